"""Requests to a plain graph that are wrong in any way: refused with the field, and nothing is left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_status import rpc_status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.daemon_process import DaemonProcess, daemon_process, unpacked
from tests.plain_daemon import outputs_of, raw_request
from tests.plain_stores import scaling_inputs, scaling_store

from dskapi.open_inference import infer_pb2, service_pb2_grpc
from dskapi.v1 import control_pb2, control_pb2_grpc

INVALID = grpc.StatusCode.INVALID_ARGUMENT
LARGE_BYTES = 100 << 20
ROUNDS = 12
GROWTH_BYTES = 300 << 20
"""Of the daemon over all wrong requests: they are 24 times 100 MiB, and the allocator keeps the blocks of two or so."""

Request = infer_pb2.ModelInferRequest
Damage = Callable[[Request, Any], str]
"""Makes a good request (in raw contents, of x and index) wrong; the field that the refusal must name."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    store = scaling_store(tmp_path_factory.mktemp("stores") / "scaling")
    model = {"path": str(store), "engine": "onnxruntime", "batching": {"max_size": 4}}
    with daemon_process({"tiny": model}, max_message_bytes="256MiB") as daemon:
        yield daemon.start()
        assert daemon.process.poll() is None
        assert daemon.log("unexpected error") == []
        assert daemon.stop() == 0


@pytest.fixture(scope="module")
def channel(daemon: DaemonProcess) -> Iterator[grpc.Channel]:
    options = (("grpc.max_send_message_length", -1),)
    with grpc.insecure_channel(daemon.target, options=options) as channel:
        yield channel


def infer(channel: grpc.Channel, request: Request) -> Any:
    stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    return stub.ModelInfer(request)


def typed(request: Request) -> None:
    """Moves the contents of a good request into typed ones."""
    for tensor, values in zip(request.inputs, scaling_inputs(2).values(), strict=True):
        field = "fp32_contents" if tensor.datatype == "FP32" else "int64_contents"
        getattr(tensor.contents, field).extend(values.ravel().tolist())
    del request.raw_input_contents[:]


def wrong_name(request: Request, data: Any) -> str:
    index = data.draw(st.integers(0, 1))
    request.inputs[index].name = data.draw(st.text(max_size=20).filter(lambda name: name not in ("x", "index")))
    return f"inputs[{index}].name"


def missing_input(request: Request, data: Any) -> str:
    index = data.draw(st.integers(0, 1))
    del request.inputs[index]
    del request.raw_input_contents[index]
    return "inputs"


def input_given_twice(request: Request, data: Any) -> str:
    request.inputs.append(request.inputs[data.draw(st.integers(0, 1))])
    return "inputs[2].name"


def wrong_datatype(request: Request, data: Any) -> str:
    index = data.draw(st.integers(0, 1))
    other = st.sampled_from(["BOOL", "INT8", "UINT64", "FP16", "BF16", "FP64", "BYTES", "", "fp32"]) | st.text()
    request.inputs[index].datatype = data.draw(other.filter(lambda name: name not in ("FP32", "INT64")))
    return f"inputs[{index}].datatype"


def wrong_shape(request: Request, data: Any) -> str:
    index = data.draw(st.integers(0, 1))
    sizes = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 4, 2**31, 2**62, 2**63 - 1]) | st.integers(-9, 9)
    width = (3, 1)[index]
    shape = data.draw(
        st.lists(sizes, max_size=40).filter(lambda shape: len(shape) != 2 or shape[0] < 1 or shape[1] != width)
    )
    request.inputs[index].shape[:] = shape
    return f"inputs[{index}].shape"


def too_many_rows_for_the_contents(request: Request, data: Any) -> str:
    rows = data.draw(st.sampled_from([1, 3, 2**31, 2**62, 2**63 - 1]))
    for tensor in request.inputs:
        tensor.shape[0] = rows
    return "raw_input_contents[0]"


def different_rows(request: Request, data: Any) -> str:
    request.inputs[1].shape[0] = 1
    request.raw_input_contents[1] = request.raw_input_contents[1][:8]
    return "inputs[1].shape"


def wrong_length(request: Request, data: Any) -> str:
    index = data.draw(st.integers(0, 1))
    length = len(request.raw_input_contents[index])
    request.raw_input_contents[index] = data.draw(st.binary(max_size=100).filter(lambda raw: len(raw) != length))
    return f"raw_input_contents[{index}]"


def wrong_number_of_contents(request: Request, data: Any) -> str:
    if data.draw(st.booleans()):
        request.raw_input_contents.append(b"1234")
    else:
        del request.raw_input_contents[1]
    return "raw_input_contents"


def both_kinds_of_contents(request: Request, data: Any) -> str:
    index = data.draw(st.integers(0, 1))
    request.inputs[index].contents.fp32_contents.append(1.0)
    return f"inputs[{index}].contents"


def typed_contents_of_another_type(request: Request, data: Any) -> str:
    typed(request)
    field = data.draw(st.sampled_from(["bool_contents", "int_contents", "uint64_contents", "fp64_contents"]))
    getattr(request.inputs[1].contents, field).append(1)
    return f"inputs[1].contents.{field}"


def too_few_typed_contents(request: Request, data: Any) -> str:
    typed(request)
    del request.inputs[0].contents.fp32_contents[data.draw(st.integers(0, 5)) :]
    return "inputs[0].contents.fp32_contents"


def unknown_output(request: Request, data: Any) -> str:
    request.outputs.add(name=data.draw(st.text(max_size=9).filter(lambda name: name not in ("y", "z"))))
    return "outputs[0].name"


def output_asked_for_twice(request: Request, data: Any) -> str:
    for _ in range(2):
        request.outputs.add(name="y")
    return "outputs[1].name"


def unknown_parameter(request: Request, data: Any) -> str:
    name = data.draw(st.sampled_from(["max_tokens", "sequence_id", "Precision", "ö"]))
    request.parameters[name].int64_param = 1
    return f"parameters.{name}"


def wrong_precision(request: Request, data: Any) -> str:
    wrong = st.sampled_from(["fp16", "INT8", ""]) | st.text(max_size=9)
    request.parameters["precision"].string_param = data.draw(wrong.filter(lambda word: word not in KNOWN_MODES))
    return "parameters.precision"


def parameter_of_a_tensor(request: Request, data: Any) -> str:
    request.inputs[0].parameters["shared_memory_region"].string_param = "mine"
    return "inputs[0].parameters.shared_memory_region"


def unknown_version(request: Request, data: Any) -> str:
    request.model_version = data.draw(st.sampled_from(["2", "01", "latest"]))
    return "model_version"


KNOWN_MODES = ("int4", "int8", "fp32")
DAMAGES: tuple[Damage, ...] = (
    wrong_name,
    missing_input,
    input_given_twice,
    wrong_datatype,
    wrong_shape,
    too_many_rows_for_the_contents,
    different_rows,
    wrong_length,
    wrong_number_of_contents,
    both_kinds_of_contents,
    typed_contents_of_another_type,
    too_few_typed_contents,
    unknown_output,
    output_asked_for_twice,
    unknown_parameter,
    wrong_precision,
    parameter_of_a_tensor,
    unknown_version,
)


def refused(channel: grpc.Channel, request: Request) -> tuple[grpc.StatusCode, str]:
    """Status, and the field that it names."""
    with pytest.raises(grpc.RpcError) as caught:
        infer(channel, request)
    error: Any = caught.value
    status = rpc_status.from_call(error)
    assert status is not None
    return error.code(), unpacked(status.details[0]).field_violations[0].field


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_what_is_wrong_with_a_request_is_named(channel: grpc.Channel, damage: Damage, data: st.DataObject) -> None:
    request = raw_request("tiny", scaling_inputs(2))
    field = damage(request, data)
    assert refused(channel, request) == (INVALID, field)


def test_good_requests_are_answered_among_wrong_ones_and_large_ones_leave_nothing(channel: grpc.Channel) -> None:
    good, rows = raw_request("tiny", scaling_inputs(2)), LARGE_BYTES // 12
    large = raw_request("tiny", {"x": np.zeros((rows, 3), np.float32), "index": np.zeros((1, 1), np.int64)})
    odd = raw_request("tiny", scaling_inputs(2))
    odd.raw_input_contents[0] = bytes(LARGE_BYTES)
    held = []
    for _ in range(ROUNDS):
        assert refused(channel, large) == (INVALID, "inputs[1].shape")
        assert refused(channel, odd) == (INVALID, "raw_input_contents[0]")
        assert outputs_of(infer(channel, good))["y"].shape == (2, 3)
        held.append(rss_bytes(channel))
    print([size >> 20 for size in held])
    assert max(held[1:]) - held[0] < GROWTH_BYTES


def rss_bytes(channel: grpc.Channel) -> int:
    stub: Any = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
    return int(stub.GetStatus(control_pb2.GetStatusRequest()).rss_bytes)
