"""A daemon in this process that serves plain graphs, and requests to them; for the tests of plain graphs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tests.fake_host import Service

from dskapi.open_inference import infer_pb2, service_pb2_grpc
from dskd.address import Address
from dskd.config import Config, ModelConfig, ServerConfig
from dskd.model_host import host_factory
from dskd.server import Daemon
from dskquant.plain.protocol import Tensors

DTYPES = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "INT32": "<i4", "INT64": "<i8"}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

Models = Mapping[str, ModelConfig]


@asynccontextmanager
async def serving_plain(folder: Path, models: Models, **sections: Any) -> AsyncIterator[Service]:
    """A daemon on a unix socket in `folder` with these models, loaded."""
    socket = folder / "dskd.sock"
    server = ServerConfig(listen=(Address(path=socket),), grace_s=5.0, state_dir=folder / "state")
    config = Config(server=server, models=dict(models), **sections)
    daemon = Daemon(config, host_factory(config))
    await daemon.startup()
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=[("grpc.max_send_message_length", -1)]) as channel:
        service = Service(channel, daemon)
        try:
            for name in models:
                loading = daemon.registry.get(name).loading
                assert loading is not None
                await loading
            yield service
        finally:
            daemon.stop()
            await service.end()


def stub(service: Service) -> Any:
    """The stubs of grpc know the synchronous channel alone; hence Any."""
    return service_pb2_grpc.GRPCInferenceServiceStub(service.channel)  # type: ignore[no-untyped-call]


def raw_request(model: str, tensors: Tensors, **parameters: str) -> infer_pb2.ModelInferRequest:
    """A request with raw contents."""
    request = infer_pb2.ModelInferRequest(model_name=model, id="seven")
    for name, array in tensors.items():
        request.inputs.add(name=name, datatype=NAMES[array.dtype], shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request


def outputs_of(response: infer_pb2.ModelInferResponse) -> dict[str, NDArray[Any]]:
    """The outputs in raw contents."""
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: np.frombuffer(raw, DTYPES[output.datatype]).reshape(output.shape) for output, raw in pairs}


def label_of(response: infer_pb2.ModelInferResponse) -> tuple[str, int, str]:
    """Mode, generation and engine that served."""
    told = response.parameters
    return told["mode"].string_param, told["generation"].int64_param, told["engine"].string_param
