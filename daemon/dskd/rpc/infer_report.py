"""Models as the Open Inference Protocol shows them."""

from __future__ import annotations

from dskapi.open_inference import model_config_pb2, repository_pb2, service_pb2, statistics_pb2
from dskd.host import ModelHost
from dskd.registry import ModelEntry
from dskd.rpc.infer_request import VERSION
from dskd.rpc.tally import Tally, Total
from dskd.rpc.text_tensors import DATATYPE, SHAPE, TEXT_INPUT, TEXT_OUTPUT
from dskd.states import ModelState

PLATFORM = "dskd_text_generation"
BACKEND = "dskd"

INDEX_STATES = {
    ModelState.UNLOADED: "UNAVAILABLE",
    ModelState.LOADING: "LOADING",
    ModelState.SERVING: "READY",
    ModelState.UNLOADING: "UNLOADING",
    ModelState.FAILED: "UNAVAILABLE",
}

TensorMetadata = service_pb2.ModelMetadataResponse.TensorMetadata


def model_metadata(name: str, host: ModelHost) -> service_pb2.ModelMetadataResponse:
    """The tensors of a model, and as properties what serves at the moment."""
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


def model_config(name: str) -> model_config_pb2.ModelConfigResponse:
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
