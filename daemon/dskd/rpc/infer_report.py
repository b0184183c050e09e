"""Models as the Open Inference Protocol shows them."""

from __future__ import annotations

from collections.abc import Sequence

from dskapi.open_inference import model_config_pb2, repository_pb2, service_pb2, statistics_pb2
from dskd.host import ModelHost, PlainHost, ServedModel, is_language, is_plain
from dskd.registry import ModelEntry
from dskd.rpc.infer_request import VERSION
from dskd.rpc.tally import Tally, Total
from dskd.rpc.tensors import datatype_of
from dskd.rpc.text_tensors import DATATYPE, SHAPE, TEXT_INPUT, TEXT_OUTPUT
from dskd.states import ModelState
from dskquant.modes import LADDER
from dskquant.plain.protocol import TensorSpec

PLATFORM = "dskd_text_generation"
GRAPH_PLATFORM = "dskd_plain_graph"
BACKEND = "dskd"
ANY_SIZE = -1

INDEX_STATES = {
    ModelState.UNLOADED: "UNAVAILABLE",
    ModelState.LOADING: "LOADING",
    ModelState.SERVING: "READY",
    ModelState.UNLOADING: "UNLOADING",
    ModelState.FAILED: "UNAVAILABLE",
}

TensorMetadata = service_pb2.ModelMetadataResponse.TensorMetadata


def model_metadata(name: str, host: ServedModel) -> service_pb2.ModelMetadataResponse:
    """The tensors of a model, and as properties what serves at the moment."""
    if is_plain(host):
        return _graph_metadata(name, host)
    return _text_metadata(name, host) if is_language(host) else service_pb2.ModelMetadataResponse(name=name)


def _graph_metadata(name: str, host: PlainHost) -> service_pb2.ModelMetadataResponse:
    now = host.snapshot()
    return service_pb2.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=GRAPH_PLATFORM,
        inputs=map(_tensor_metadata, host.manifest.inputs),
        outputs=map(_tensor_metadata, host.manifest.outputs),
        properties={
            "modes": ",".join(mode.value for mode in LADDER if mode in host.manifest.graphs),
            "engine": now.engine,
            "mode": now.mode.value,
            "generation": str(now.generation),
        },
    )


def _tensor_metadata(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(name=spec.name, datatype=datatype_of(spec).name, shape=_sizes(spec.shape))


def _sizes(shape: Sequence[int | None]) -> list[int]:
    return [ANY_SIZE if size is None else size for size in shape]


def _text_metadata(name: str, host: ModelHost) -> service_pb2.ModelMetadataResponse:
    now = host.snapshot()
    return service_pb2.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[TensorMetadata(name=TEXT_INPUT, datatype=DATATYPE, shape=SHAPE)],
        outputs=[TensorMetadata(name=TEXT_OUTPUT, datatype=DATATYPE, shape=SHAPE)],
        properties={
            "architecture": host.manifest.architecture,
            "context_length": str(host.manifest.context_length),
            "engine": now.engine,
            "mode": now.mode.value,
            "generation": str(now.generation),
        },
    )


def model_config(name: str, host: ServedModel | None) -> model_config_pb2.ModelConfigResponse:
    """As Triton's clients know it. With batching, sizes of tensors are without the first one, the rows."""
    if host is not None and is_plain(host):
        return model_config_pb2.ModelConfigResponse(config=_graph_config(name, host))
    string = model_config_pb2.TYPE_STRING
    config = model_config_pb2.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=BACKEND,
        max_batch_size=0,
        input=[model_config_pb2.ModelInput(name=TEXT_INPUT, data_type=string, dims=SHAPE)],
        output=[model_config_pb2.ModelOutput(name=TEXT_OUTPUT, data_type=string, dims=SHAPE)],
        model_transaction_policy=model_config_pb2.ModelTransactionPolicy(decoupled=True),
    )
    return model_config_pb2.ModelConfigResponse(config=config)


def _graph_config(name: str, host: PlainHost) -> model_config_pb2.ModelConfig:
    batching, manifest = host.config.batching, host.manifest
    has_batches = batching is not None and manifest.batch_axis == 0
    skipped = 1 if has_batches else 0
    return model_config_pb2.ModelConfig(
        name=name,
        platform=GRAPH_PLATFORM,
        backend=BACKEND,
        max_batch_size=batching.max_size if batching is not None and has_batches else 0,
        input=[
            model_config_pb2.ModelInput(
                name=spec.name, data_type=datatype_of(spec).config, dims=_sizes(spec.shape[skipped:])
            )
            for spec in manifest.inputs
        ],
        output=[
            model_config_pb2.ModelOutput(
                name=spec.name, data_type=datatype_of(spec).config, dims=_sizes(spec.shape[skipped:])
            )
            for spec in manifest.outputs
        ],
    )


def model_index(model: ModelEntry) -> repository_pb2.RepositoryIndexResponse.ModelIndex:
    return repository_pb2.RepositoryIndexResponse.ModelIndex(
        name=model.name, version=VERSION, state=INDEX_STATES[model.state], reason=model.reason
    )


def model_statistics(model: ModelEntry, tally: Tally) -> statistics_pb2.ModelStatistics:
    return statistics_pb2.ModelStatistics(
        name=model.name,
        version=VERSION,
        last_inference=round(tally.latest * 1e3),
        inference_count=tally.answered.count,
        execution_count=model.host.snapshot().loop.steps if model.host else 0,
        inference_stats=statistics_pb2.InferStatistics(
            success=_duration(tally.answered),
            fail=_duration(tally.failed),
            queue=_duration(tally.queue),
            compute_input=_duration(tally.parsing),
            compute_infer=_duration(tally.computing),
        ),
    )


def _duration(total: Total) -> statistics_pb2.StatisticDuration:
    return statistics_pb2.StatisticDuration(count=total.count, ns=round(total.seconds * 1e9))
