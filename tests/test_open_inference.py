"""The Open Inference Protocol: what requests mean, what answers carry, and that a client of others works with it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from tests.daemon_process import refusal
from tests.fake_host import END, FakeHost, Service, asynchronous, output, outputs, serving, tiny_codec

from dskapi.open_inference import (
    infer_pb2,
    model_config_pb2,
    repository_pb2,
    service_pb2,
    service_pb2_grpc,
    statistics_pb2,
)
from dskapi.v1 import inference_pb2
from dskd.engine.request import FinishReason, GenerationRequest, SamplingParams, StepOutput
from dskd.rpc.infer_request import PARAMETER_KINDS, generate_request
from dskd.rpc.infer_stream import MOST_OPEN
from dskd.text.tokenizer import TextCodec
from dskquant.errors import StoreError
from dskquant.modes import PrecisionMode

SESSION = Path(__file__).with_name("triton_session.py")
NEW_TOKENS = 12  # as in SESSION
PROMPT = "Once upon a time, in a village by the sea,"
INVALID = grpc.StatusCode.INVALID_ARGUMENT

Parameter = infer_pb2.InferParameter
Request = infer_pb2.ModelInferRequest
Input = Request.InferInputTensor
Output = Request.InferRequestedOutputTensor
Contents = infer_pb2.InferTensorContents


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return tiny_codec(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def host(codec: TextCodec) -> FakeHost:
    return FakeHost(codec, outputs("fine"))


def stub(service: Service) -> Any:
    channel: Any = service.channel  # the stubs know the synchronous one alone
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def typed(text: str = "hello", **request: Any) -> Request:
    contents = Contents(bytes_contents=[text.encode()])
    return Request(inputs=[Input(name="text_input", datatype="BYTES", shape=[1], contents=contents)], **request)


def raw(text: str = "hello", **request: Any) -> Request:
    content = text.encode()
    tensor = Input(name="text_input", datatype="BYTES", shape=[1])
    return Request(inputs=[tensor], raw_input_contents=[len(content).to_bytes(4, "little") + content], **request)


def wrong_input(raw_contents: tuple[bytes, ...] = (), **tensor: Any) -> Request:
    """The usual request but for what is given."""
    usual = {} if raw_contents else {"contents": Contents(bytes_contents=[b"hello"])}
    whole = {"name": "text_input", "datatype": "BYTES", "shape": [1], **usual, **tensor}
    return Request(inputs=[Input(**whole)], raw_input_contents=raw_contents)


def values(response: infer_pb2.ModelInferResponse) -> dict[str, Any]:
    """Its parameters."""
    return {
        name: getattr(parameter, parameter.WhichOneof("parameter_choice") or "")
        for name, parameter in response.parameters.items()
    }


def text_of(response: infer_pb2.ModelInferResponse) -> str:
    """Its only output, which must be well formed; read as the protocol says."""
    (tensor,) = response.outputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("text_output", "BYTES", [1])
    if not response.raw_output_contents:
        (content,) = tensor.contents.bytes_contents
        return content.decode()
    (told,) = response.raw_output_contents
    assert not tensor.HasField("contents")
    assert int.from_bytes(told[:4], "little") == len(told) - 4
    return told[4:].decode()


async def streamed(service: Service, *requests: Request) -> list[infer_pb2.ModelStreamInferResponse]:
    """All responses to a stream of `requests`."""
    return [response async for response in stub(service).ModelStreamInfer(iter(requests))]


def field_of(details: list[Any]) -> str:
    (violation,) = details[0].field_violations
    return str(violation.field)


# Whole answers


@pytest.mark.parametrize("request_of", [typed, raw])
@asynchronous
async def test_an_answer_comes_whole_and_in_the_contents_of_its_request(
    tmp_path: Path, codec: TextCodec, request_of: Any
) -> None:
    host = FakeHost(codec, outputs("a€b", FinishReason.LENGTH))
    async with serving(tmp_path, {"m": host}) as service:
        response = await stub(service).ModelInfer(request_of("hé", model_name="m", id="mine"))
    assert text_of(response) == "a€b"
    assert bool(response.raw_output_contents) == (request_of is raw)
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "mine")
    assert values(response) == {
        "mode": "int4",
        "generation": 1,
        "engine": "fake",
        "finish_reason": "length",
        "prompt_tokens": 3,
        "generated_tokens": 5,
    }
    assert bytes(host.requests[0].prompt) == "hé".encode()


@asynchronous
async def test_an_answer_that_changed_its_mode_tells_the_share_of_each(tmp_path: Path, codec: TextCodec) -> None:
    script = [
        output(104),
        output(105, 105, mode=PrecisionMode.INT8),
        output(END, mode=PrecisionMode.FP32, finish=FinishReason.END_OF_TEXT),
    ]
    async with serving(tmp_path, {"m": FakeHost(codec, script)}) as service:
        told = values(await stub(service).ModelInfer(typed()))
    assert (told["mode"], told["generation"], told["engine"]) == ("int8", 1, "fake")
    assert json.loads(told["shares"]) == [
        {"mode": "int4", "generation": 1, "engine": "fake", "share": 0.25},
        {"mode": "int8", "generation": 1, "engine": "fake", "share": 0.5},
        {"mode": "fp32", "generation": 1, "engine": "fake", "share": 0.25},
    ]
    assert told["finish_reason"] == "end_of_text"


@asynchronous
async def test_the_engine_gets_what_the_parameters_say(tmp_path: Path, host: FakeHost) -> None:
    parameters = {
        "max_tokens": Parameter(int64_param=9),
        "temperature": Parameter(double_param=0.5),
        "top_k": Parameter(uint64_param=7),
        "top_p": Parameter(double_param=0.25),
        "min_p": Parameter(double_param=0.125),
        "repetition_penalty": Parameter(int64_param=2),
        "seed": Parameter(uint64_param=2**64 - 1),
        "precision": Parameter(string_param="fp16"),
        "ignore_eos": Parameter(bool_param=True),
        "triton_enable_empty_final_response": Parameter(bool_param=True),
    }
    async with serving(tmp_path, {"m": host}) as service:
        await stub(service).ModelInfer(typed(parameters=parameters))
    (asked,) = host.requests
    assert asked.max_new_tokens == 9
    assert asked.sampling == SamplingParams(0.5, 7, 0.25, 0.125, 2, 2**64 - 1)
    assert asked.precision is PrecisionMode.FP16
    assert asked.end_token_ids == frozenset()


@asynchronous
async def test_without_parameters_the_defaults_are_those_of_generate(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        await stub(service).ModelInfer(typed())
        assert [r async for r in service.inference.Generate(inference_pb2.GenerateRequest(prompt="hello"))]
    ours, theirs = host.requests
    assert (ours.prompt, ours.max_new_tokens, ours.precision) == (theirs.prompt, theirs.max_new_tokens, None)
    assert ours.end_token_ids == theirs.end_token_ids == {END}
    assert ours.sampling.temperature == 0
    assert ours.sampling.seed != theirs.sampling.seed


@asynchronous
async def test_a_stop_string_ends_the_answer_before_it(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [*outputs("one two three")[:-1], asyncio.Event()])
    async with serving(tmp_path, {"m": host}) as service:
        response = await stub(service).ModelInfer(typed(parameters={"stop": Parameter(string_param="two")}))
        await host.freed.get()
    assert text_of(response) == "one "
    assert values(response)["finish_reason"] == "stop"


# Streams


@asynchronous
async def test_a_stream_gets_whole_characters_and_the_last_piece_says_so(tmp_path: Path, codec: TextCodec) -> None:
    async with serving(tmp_path, {"m": FakeHost(codec, outputs("a€b"))}) as service:
        pieces = [response.infer_response for response in await streamed(service, raw(id="7"))]
    assert [text_of(piece) for piece in pieces] == ["a", "€", "b"]
    assert {piece.id for piece in pieces} == {"7"}
    assert [values(piece)["triton_final_response"] for piece in pieces] == [False, False, True]
    assert ["finish_reason" in values(piece) for piece in pieces] == [False, False, True]
    assert values(pieces[-1])["generated_tokens"] == 5


@asynchronous
async def test_each_piece_tells_what_made_it(tmp_path: Path, codec: TextCodec) -> None:
    first, second, third = "€".encode()
    script = [
        output(104),
        output(first, second),
        output(third, mode=PrecisionMode.INT8),
        output(33, mode=PrecisionMode.INT8),
        output(END, mode=PrecisionMode.FP32, finish=FinishReason.END_OF_TEXT),
    ]
    async with serving(tmp_path, {"m": FakeHost(codec, script)}) as service:
        pieces = [response.infer_response for response in await streamed(service, typed())]
    assert [(text_of(piece), values(piece)["mode"]) for piece in pieces] == [
        ("h", "int4"),
        ("€", "int4"),
        ("!", "int8"),
        ("", "fp32"),
    ]
    assert ["shares" in values(piece) for piece in pieces] == [False, True, False, False]
    assert [made["share"] for made in json.loads(values(pieces[1])["shares"])] == pytest.approx([2 / 3, 1 / 3])


@asynchronous
async def test_a_refused_request_does_not_end_its_stream(tmp_path: Path, host: FakeHost) -> None:
    wrong = typed(id="wrong", parameters={"max_tokens": Parameter(int64_param=0)})
    async with serving(tmp_path, {"m": host}) as service:
        responses = await streamed(service, typed(model_name="nobody", id="lost"), wrong, typed(id="right"))
    refused = {r.infer_response.id: r.error_message for r in responses if r.error_message}
    assert refused == {
        "lost": "NOT_FOUND: no model 'nobody'; known: m",
        "wrong": "INVALID_ARGUMENT: parameters.max_tokens: 0 is not allowed; allowed: at least 1",
    }
    right = [r.infer_response for r in responses if not r.error_message]
    assert {response.id for response in right} == {"right"}
    assert "".join(map(text_of, right)) == "fine"


@asynchronous
async def test_an_unexpected_error_is_told_by_its_id_alone(tmp_path: Path, codec: TextCodec) -> None:
    async with serving(tmp_path, {"m": FakeHost(codec, [output(104), ValueError("secret")])}) as service:
        first, last = await streamed(service, typed(id="7"))
    assert text_of(first.infer_response) == "h"
    assert last.infer_response.id == "7"
    assert last.error_message.startswith("INTERNAL: internal error ")
    assert "secret" not in last.error_message


@asynchronous
async def test_each_request_of_a_stream_has_a_line_in_the_log(
    tmp_path: Path, host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)  # that of the lines of requests that went well
    async with serving(tmp_path, {"m": host}) as service:
        with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as lines:
            await streamed(service, typed(), typed(""))
    calls = [line for line in lines if line["event"] == "call" and line["method"].startswith("request of ")]
    assert {line["code"] for line in calls} == {"OK", "INVALID_ARGUMENT"}
    assert len({line["request_id"] for line in calls}) == 2


class Held(FakeHost):
    """Answers nobody before `release` is set, and knows how many have waited for that at the same time."""

    def __init__(self, codec: TextCodec, wanted: int) -> None:
        super().__init__(codec)
        self.wanted = wanted
        self.waiting = self.most_waiting = 0
        self.all_wait = asyncio.Event()
        self.release = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StepOutput, None]:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        if self.waiting == self.wanted:
            self.all_wait.set()
        try:
            await self.release.wait()
            yield output(104, finish=FinishReason.LENGTH)
        finally:
            self.waiting -= 1
            self.freed.put_nowait(request.request_id)


@asynchronous
async def test_requests_of_a_stream_are_answered_at_the_same_time(tmp_path: Path, codec: TextCodec) -> None:
    host = Held(codec, wanted=3)
    async with serving(tmp_path, {"m": host}) as service:
        answers = asyncio.create_task(streamed(service, *(typed(id=name) for name in "abc")))
        await host.all_wait.wait()
        host.release.set()
        assert sorted(response.infer_response.id for response in await answers) == ["a", "b", "c"]


@asynchronous
async def test_a_stream_with_many_requests_waits_its_turn(tmp_path: Path, codec: TextCodec) -> None:
    host = Held(codec, wanted=MOST_OPEN)
    names = [str(number) for number in range(3 * MOST_OPEN)]
    async with serving(tmp_path, {"m": host}, max_concurrent_requests=MOST_OPEN) as service:
        answers = asyncio.create_task(streamed(service, *(typed(id=name) for name in names)))
        await host.all_wait.wait()
        host.release.set()
        responses = await answers
    assert host.most_waiting == MOST_OPEN
    assert not any(response.error_message for response in responses)
    assert sorted(response.infer_response.id for response in responses) == sorted(names)


# Ends


@asynchronous
async def test_a_client_that_goes_away_frees_its_request(tmp_path: Path, codec: TextCodec) -> None:
    host = Held(codec, wanted=1)
    async with serving(tmp_path, {"m": host}) as service:
        call = stub(service).ModelInfer(typed())
        code = asyncio.create_task(call.code())
        await host.all_wait.wait()
        call.cancel()
        assert await code is grpc.StatusCode.CANCELLED
        assert await host.freed.get()


@asynchronous
async def test_a_client_that_leaves_its_stream_frees_all_requests_in_it(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [output(104), asyncio.Event()])
    async with serving(tmp_path, {"m": host}) as service:
        call = stub(service).ModelStreamInfer()
        await call.write(typed(id="a"))
        await call.write(typed(id="b"))
        assert {(await call.read()).infer_response.id for _ in "ab"} == {"a", "b"}
        call.cancel()
        freed = {await host.freed.get(), await host.freed.get()}
    assert freed == {request.request_id for request in host.requests}


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@asynchronous
async def test_a_deadline_frees_the_request(tmp_path: Path, codec: TextCodec, method: str) -> None:
    host = FakeHost(codec, [output(104), asyncio.Event()])
    async with serving(tmp_path, {"m": host}) as service:
        asked = typed() if method == "ModelInfer" else iter([typed()])
        call = getattr(stub(service), method)(asked, timeout=0.2)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await host.freed.get() == host.requests[0].request_id


@asynchronous
async def test_requests_are_refused_while_the_daemon_is_full(tmp_path: Path, codec: TextCodec) -> None:
    host = Held(codec, wanted=1)
    async with serving(tmp_path, {"m": host}, max_concurrent_requests=1) as service:
        first = asyncio.create_task(stub(service).ModelInfer(typed()).code())
        await host.all_wait.wait()
        code, _, details = await refusal(stub(service).ModelInfer(typed()))
        (refused,) = await streamed(service, typed())
        host.release.set()
        assert await first is grpc.StatusCode.OK
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(details[0], error_details_pb2.QuotaFailure)
    assert refused.error_message.startswith("RESOURCE_EXHAUSTED: 1 requests are open")


# Wrong requests

ELEMENT = b"\x05\x00\x00\x00hello"
WRONG_INPUTS: list[tuple[Request, str, str]] = [
    (Request(), "inputs", "0 tensors; exactly one is needed: text_input"),
    (Request(inputs=[*typed().inputs, *typed().inputs]), "inputs", "2 tensors; exactly one"),
    (wrong_input(name="prompt"), "inputs[0].name", "no input 'prompt'; the only one: text_input"),
    (wrong_input(datatype="FP32"), "inputs[0].datatype", "'FP32' is not allowed; allowed: BYTES"),
    (wrong_input(datatype=""), "inputs[0].datatype", "'' is not allowed"),
    *(
        (wrong_input(shape=shape), "inputs[0].shape", f"{shape} is not allowed; allowed: [1]")
        for shape in ([], [2], [-1], [0], [1, 1], [2**63 - 1], [-(2**63)])
    ),
    (
        wrong_input(parameters={"shared_memory_region": Parameter(string_param="x")}),
        "inputs[0].parameters.shared_memory_region",
        "is not known",
    ),
    (wrong_input(contents=Contents()), "inputs[0].contents.bytes_contents", "0 elements; the shape says 1"),
    (
        wrong_input(contents=Contents(bytes_contents=[b"a", b"b"])),
        "inputs[0].contents.bytes_contents",
        "2 elements; the shape says 1",
    ),
    (
        wrong_input(contents=Contents(bytes_contents=[b"a"], fp32_contents=[1, 2])),
        "inputs[0].contents.fp32_contents",
        "2 elements; BYTES belong into bytes_contents",
    ),
    (
        wrong_input(contents=Contents(bytes_contents=[b"a\xff"])),
        "inputs[0].contents.bytes_contents[0]",
        "is no UTF-8 text: invalid start byte at byte 1",
    ),
    (wrong_input((ELEMENT, ELEMENT)), "raw_input_contents", "2 contents for 1 input"),
    (
        wrong_input((ELEMENT,), contents=Contents(bytes_contents=[b"a"])),
        "inputs[0].contents",
        "must not be set together with raw_input_contents",
    ),
    (wrong_input((b"\x05\x00\x00",)), "raw_input_contents[0]", "3 bytes; an element begins with its length in 4"),
    (wrong_input((b"hello",)), "raw_input_contents[0]", "an element of 1819043176 bytes, 1 follow its length"),
    (wrong_input((ELEMENT + b"!",)), "raw_input_contents[0]", "an element of 5 bytes, 6 follow its length"),
    (wrong_input((ELEMENT[:-1] + b"\xff",)), "raw_input_contents[0]", "is no UTF-8 text"),
    (typed(""), "text_input", "must not be empty"),
    (typed("x" * 1000), "text_input", "1000 tokens; the context of the model holds 1000"),
    (typed("x" * 6000), "text_input", "6000 bytes; the context of the model holds 1000 tokens of at most 5"),
    (typed(outputs=[Output(name="logits")]), "outputs[0].name", "no output 'logits'; the only one: text_output"),
    (typed(outputs=[Output(name="text_output")] * 2), "outputs", "text_output is asked for 2 times"),
    (
        typed(outputs=[Output(name="text_output", parameters={"classification": Parameter(int64_param=1)})]),
        "outputs[0].parameters.classification",
        "is not known",
    ),
    (typed(model_version="2"), "model_version", "no version '2'; the only one: 1"),
]
WRONG_PARAMETERS: list[tuple[str, Parameter, str]] = [
    ("sequence_id", Parameter(int64_param=1), "is not known; known: max_tokens, "),
    ("max_tokens", Parameter(), "nothing is not allowed; allowed: int"),
    ("max_tokens", Parameter(double_param=1), "float is not allowed; allowed: int"),
    ("max_tokens", Parameter(bool_param=True), "bool is not allowed; allowed: int"),
    ("max_tokens", Parameter(int64_param=0), "0 is not allowed; allowed: at least 1"),
    ("max_tokens", Parameter(int64_param=2**31), "2.14748e+09 is not allowed"),
    ("top_k", Parameter(int64_param=-1), "-1 is not allowed; allowed: at least 0"),
    ("top_k", Parameter(uint64_param=2**64 - 1), "1.84467e+19 is not allowed"),
    ("temperature", Parameter(string_param="hot"), "str is not allowed; allowed: float or int"),
    ("temperature", Parameter(double_param=math.nan), "nan is not allowed; allowed: at least 0, at most 10"),
    ("temperature", Parameter(double_param=1e300), "inf is not allowed"),
    ("temperature", Parameter(int64_param=2**62), "4.61169e+18 is not allowed"),
    ("top_p", Parameter(int64_param=0), "0 is not allowed; allowed: above 0, at most 1"),
    ("min_p", Parameter(double_param=1.5), "1.5 is not allowed"),
    ("repetition_penalty", Parameter(double_param=-1), "-1 is not allowed"),
    ("seed", Parameter(int64_param=-1), "-1 is not allowed; allowed: at least 0"),
    ("stop", Parameter(string_param=""), "must not be empty"),
    ("stop", Parameter(string_param="x" * 1025), "1025 characters; at most 1024 are allowed"),
    ("precision", Parameter(string_param="INT2"), "'INT2' is no precision mode; known: int4, int8, fp16, fp32"),
    ("ignore_eos", Parameter(int64_param=1), "int is not allowed; allowed: bool"),
]


@asynchronous
async def test_every_wrong_field_is_named_and_leaves_the_daemon_serving(tmp_path: Path, host: FakeHost) -> None:
    wrong = [
        *WRONG_INPUTS,
        *((typed(parameters={name: value}), f"parameters.{name}", told) for name, value, told in WRONG_PARAMETERS),
    ]
    async with serving(tmp_path, {"m": host}) as service:
        for request, field, description in wrong:
            code, _, details = await refusal(stub(service).ModelInfer(request))
            assert (code, field_of(details)) == (INVALID, field), request
            assert description in details[0].field_violations[0].description
        assert host.requests == []
        assert text_of(await stub(service).ModelInfer(typed())) == "fine"


@asynchronous
async def test_a_model_that_must_be_named_is(tmp_path: Path, codec: TextCodec) -> None:
    async with serving(tmp_path, {"a": FakeHost(codec), "b": FakeHost(codec)}) as service:
        code, message, details = await refusal(stub(service).ModelInfer(typed()))
    assert (code, field_of(details)) == (INVALID, "model_name")
    assert message.endswith("there are: a (serving), b (serving)")


@asynchronous
async def test_what_cannot_be_decoded_is_a_wrong_request_and_ends_a_stream(tmp_path: Path, host: FakeHost) -> None:
    service_name = "/inference.GRPCInferenceService"
    async with serving(tmp_path, {"m": host}) as service:
        channel: Any = service.channel
        single = channel.unary_unary(f"{service_name}/ModelInfer")(b"\xff\xff")
        stream = channel.stream_stream(f"{service_name}/ModelStreamInfer")(iter([b"\xff\xff"]))
        for call in (single, stream):
            assert await call.code() is INVALID
            assert (await call.details()).startswith("request: cannot be decoded")


@asynchronous
async def test_a_stream_that_ends_so_frees_the_requests_before(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [output(104), asyncio.Event()])
    async with serving(tmp_path, {"m": host}) as service:
        channel: Any = service.channel
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(typed().SerializeToString())
        await call.read()
        await call.write(b"\xff\xff")
        assert await host.freed.get() == host.requests[0].request_id
        assert await call.code() is INVALID


@asynchronous
async def test_a_message_over_the_limit_is_refused_and_the_next_one_served(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}, max_message_bytes=10_000) as service:
        code, message, _ = await refusal(stub(service).ModelInfer(raw("x" * 20_000)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "10000" in message
        assert await stub(service).ModelInfer(raw())


class RunningService:
    """A daemon with the model "m", and an event loop that stands still between two calls."""

    def __init__(self, folder: Path, host: FakeHost) -> None:
        self._loop = asyncio.new_event_loop()
        self._context = serving(folder, {"m": host})
        self.service = self._loop.run_until_complete(self._context.__aenter__())

    def call(self, method: str, request: Any) -> tuple[grpc.StatusCode, list[Any], Any]:
        """Status, details and response."""
        return self._loop.run_until_complete(self._call(method, request))

    def stream(self, request: Request) -> list[infer_pb2.ModelStreamInferResponse]:
        return self._loop.run_until_complete(streamed(self.service, request))

    async def _call(self, method: str, request: Any) -> tuple[grpc.StatusCode, list[Any], Any]:
        call = getattr(stub(self.service), method)(request)
        if await call.code() is grpc.StatusCode.OK:
            return grpc.StatusCode.OK, [], await call
        code, _, details = await refusal(call)
        return code, details, None

    def close(self) -> None:
        self._loop.run_until_complete(self._context.__aexit__(None, None, None))
        self._loop.close()


@pytest.fixture(scope="module")
def running(codec: TextCodec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    running = RunningService(tmp_path_factory.mktemp("running"), FakeHost(codec, outputs("fine")))
    yield running
    running.close()


@st.composite
def odd(draw: st.DrawFn, of: type[Any], usual: dict[str, Any], **oddities: st.SearchStrategy[Any]) -> Any:
    """A message with the `usual` fields, but for two at most that are odd or not set."""
    changed = draw(st.sets(st.sampled_from(sorted(oddities)), max_size=2))
    return of(**{**usual, **{name: draw(st.none() | oddities[name]) for name in sorted(changed)}})


INT64 = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
ODD_PARAMETERS = st.dictionaries(
    st.sampled_from([*PARAMETER_KINDS, "timeout", ""]),
    st.one_of(
        st.builds(Parameter),
        st.builds(Parameter, bool_param=st.booleans()),
        st.builds(Parameter, int64_param=st.integers(-1, 9) | INT64),
        st.builds(Parameter, uint64_param=st.integers(0, 2**64 - 1)),
        st.builds(Parameter, double_param=st.floats(0, 1) | st.floats()),
        st.builds(Parameter, string_param=TEXTS | st.just("int8")),
    ),
    max_size=3,
)
TYPED = {"bytes_contents": [b"hello"]}
ODD_CONTENTS = odd(
    Contents,
    TYPED,
    bytes_contents=st.lists(st.binary(max_size=8), max_size=2),
    fp32_contents=st.lists(st.floats(width=32), max_size=2),
    int64_contents=st.lists(INT64, max_size=2),
    bool_contents=st.lists(st.booleans(), max_size=2),
)
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
ODD_INPUT = {
    "name": TEXTS,
    "datatype": st.sampled_from(["FP32", "FP16", "INT8", "bytes"]) | TEXTS,
    "shape": st.lists(st.just(1) | INT64, max_size=3),
    "parameters": ODD_PARAMETERS,
}
ODD_TYPED_INPUTS = odd(Input, {**TENSOR, "contents": Contents(**TYPED)}, contents=ODD_CONTENTS, **ODD_INPUT)
ODD_RAW_INPUTS = odd(Input, TENSOR, contents=ODD_CONTENTS, **ODD_INPUT)
ODD_FIELDS = {
    "model_name": st.just("m") | TEXTS,
    "model_version": st.just("1") | TEXTS,
    "id": TEXTS,
    "outputs": st.lists(odd(Output, {"name": "text_output"}, name=TEXTS, parameters=ODD_PARAMETERS), max_size=2),
    "parameters": ODD_PARAMETERS,
    "raw_input_contents": st.lists(st.binary(max_size=8) | st.just(ELEMENT), max_size=2),
}
ODD_REQUESTS = st.one_of(
    odd(
        Request,
        {"inputs": [Input(**TENSOR, contents=Contents(**TYPED))]},
        inputs=st.lists(ODD_TYPED_INPUTS, min_size=1, max_size=2),
        **ODD_FIELDS,
    ),
    odd(
        Request,
        {"inputs": [Input(**TENSOR)], "raw_input_contents": [ELEMENT]},
        inputs=st.lists(ODD_RAW_INPUTS, min_size=1, max_size=2),
        **ODD_FIELDS,
    ),
)


@given(request=ODD_REQUESTS)
def test_whatever_a_request_says_it_is_answered_or_told_which_field_is_wrong(
    running: RunningService, request: Request
) -> None:
    code, details, response = running.call("ModelInfer", request)
    if code is grpc.StatusCode.NOT_FOUND:
        assert request.model_name not in ("", "m")
    elif code is INVALID:
        assert field_of(details)
    else:
        assert code is grpc.StatusCode.OK
        assert text_of(response) == "fine"
    told = running.stream(request)
    if code is grpc.StatusCode.OK:
        assert "".join(text_of(piece.infer_response) for piece in told) == "fine"
    else:
        assert told[0].error_message.startswith(f"{code.name}: ")
    assert running.call("ModelInfer", typed())[0] is grpc.StatusCode.OK


@given(text=TEXTS.filter(bool), request_of=st.sampled_from([typed, raw]))
def test_any_text_comes_to_the_engine_as_it_is(codec: TextCodec, text: str, request_of: Any) -> None:
    request = Request.FromString(request_of(text).SerializeToString())
    assert generate_request(request).prompt == text


# Models


@asynchronous
async def test_health_tells_the_server_from_its_models(tmp_path: Path, codec: TextCodec, host: FakeHost) -> None:
    loading = FakeHost(codec)
    loading.load_result = asyncio.Event()

    async def ready(name: str, version: str = "") -> bool:
        asked = service_pb2.ModelReadyRequest(name=name, version=version)
        return bool((await stub(service).ModelReady(asked)).ready)

    async with serving(tmp_path, {"m": host, "slow": loading}) as service:
        assert (await stub(service).ServerLive(service_pb2.ServerLiveRequest())).live
        assert (await stub(service).ServerReady(service_pb2.ServerReadyRequest())).ready
        assert [await ready("m"), await ready("m", "1"), await ready("m", "2")] == [True, True, False]
        assert [await ready("slow"), await ready("nobody"), await ready("")] == [False, False, False]
        await stub(service).RepositoryModelUnload(repository_pb2.RepositoryModelUnloadRequest(model_name="m"))
        assert not (await stub(service).ServerReady(service_pb2.ServerReadyRequest())).ready


@asynchronous
async def test_the_metadata_say_what_goes_in_and_out_and_what_serves(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        told = await stub(service).ModelMetadata(service_pb2.ModelMetadataRequest(name="m"))
        config = (await stub(service).ModelConfig(model_config_pb2.ModelConfigRequest(name="m"))).config
        server = await stub(service).ServerMetadata(service_pb2.ServerMetadataRequest())
    tensors = [(t.name, t.datatype, list(t.shape)) for t in (*told.inputs, *told.outputs)]
    assert (told.name, list(told.versions)) == ("m", ["1"])
    assert tensors == [("text_input", "BYTES", [1]), ("text_output", "BYTES", [1])]
    assert dict(told.properties) == {
        "architecture": "llama",
        "context_length": "1000",
        "engine": "fake",
        "mode": "int4",
        "generation": "5",
    }
    assert [(t.name, t.data_type, list(t.dims)) for t in (*config.input, *config.output)] == [
        (name, model_config_pb2.TYPE_STRING, shape) for name, _, shape in tensors
    ]
    assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (0, True)
    assert server.name == "dskd"
    assert "model_repository" in server.extensions


@asynchronous
async def test_models_are_listed_loaded_and_unloaded(tmp_path: Path, codec: TextCodec, host: FakeHost) -> None:
    async def index(ready: bool = False) -> dict[str, str]:
        response = await stub(service).RepositoryIndex(repository_pb2.RepositoryIndexRequest(ready=ready))
        return {model.name: model.state for model in response.models}

    async with serving(tmp_path, {"m": host, "other": FakeHost(codec)}) as service:
        unload_dependents = repository_pb2.ModelRepositoryParameter(bool_param=True)
        await stub(service).RepositoryModelUnload(
            repository_pb2.RepositoryModelUnloadRequest(
                model_name="m", parameters={"unload_dependents": unload_dependents}
            )
        )
        assert await index() == {"m": "UNAVAILABLE", "other": "READY"}
        assert await index(ready=True) == {"other": "READY"}
        load = repository_pb2.RepositoryModelLoadRequest(model_name="m")
        await stub(service).RepositoryModelLoad(load)
        await stub(service).RepositoryModelLoad(load)  # it serves already
        assert await index() == {"m": "READY", "other": "READY"}


@asynchronous
async def test_why_a_load_failed_is_told_and_listed(tmp_path: Path, host: FakeHost) -> None:
    host.load_result = StoreError("store/m: gone")
    async with serving(tmp_path, {"m": host}) as service:
        load = repository_pb2.RepositoryModelLoadRequest(model_name="m")
        code, message, _ = await refusal(stub(service).RepositoryModelLoad(load))
        (listed,) = (await stub(service).RepositoryIndex(repository_pb2.RepositoryIndexRequest())).models
        refused, _, _ = await refusal(stub(service).ModelMetadata(service_pb2.ModelMetadataRequest(name="m")))
    assert (code, message) == (grpc.StatusCode.FAILED_PRECONDITION, "store/m: gone")
    assert (listed.state, listed.reason) == ("UNAVAILABLE", "store/m: gone")
    assert refused is grpc.StatusCode.FAILED_PRECONDITION


WRONG_CALLS: list[tuple[str, Message, grpc.StatusCode, str]] = [
    ("RepositoryIndex", repository_pb2.RepositoryIndexRequest(repository_name="r"), INVALID, "repository_name"),
    ("RepositoryModelLoad", repository_pb2.RepositoryModelLoadRequest(repository_name="r"), INVALID, "repository_name"),
    (
        "RepositoryModelLoad",
        repository_pb2.RepositoryModelLoadRequest(
            model_name="m", parameters={"config": repository_pb2.ModelRepositoryParameter(string_param="{}")}
        ),
        INVALID,
        "parameters.config",
    ),
    (
        "RepositoryModelUnload",
        repository_pb2.RepositoryModelUnloadRequest(
            model_name="m", parameters={"force": repository_pb2.ModelRepositoryParameter()}
        ),
        INVALID,
        "parameters.force",
    ),
    ("ModelMetadata", service_pb2.ModelMetadataRequest(name="m", version="7"), INVALID, "version"),
    ("ModelConfig", model_config_pb2.ModelConfigRequest(name="m", version="7"), INVALID, "version"),
    ("ModelStatistics", statistics_pb2.ModelStatisticsRequest(name="m", version="7"), INVALID, "version"),
    ("ModelMetadata", service_pb2.ModelMetadataRequest(), grpc.StatusCode.NOT_FOUND, ""),
    ("ModelConfig", model_config_pb2.ModelConfigRequest(name="x"), grpc.StatusCode.NOT_FOUND, ""),
    ("ModelStatistics", statistics_pb2.ModelStatisticsRequest(name="x"), grpc.StatusCode.NOT_FOUND, ""),
    ("RepositoryModelLoad", repository_pb2.RepositoryModelLoadRequest(), grpc.StatusCode.NOT_FOUND, ""),
    ("RepositoryModelUnload", repository_pb2.RepositoryModelUnloadRequest(), grpc.StatusCode.NOT_FOUND, ""),
]


@pytest.mark.parametrize(("method", "request_", "code", "field"), WRONG_CALLS)
def test_wrong_calls_about_models_name_what_is_wrong(
    running: RunningService, method: str, request_: Message, code: grpc.StatusCode, field: str
) -> None:
    told, details, _ = running.call(method, request_)
    assert told is code
    if field:
        assert field_of(details) == field


@asynchronous
async def test_statistics_count_the_requests_of_all_services(tmp_path: Path, codec: TextCodec) -> None:
    host, idle = FakeHost(codec, outputs("fine")), FakeHost(codec)
    async with serving(tmp_path, {"m": host, "idle": idle}) as service:
        await stub(service).ModelInfer(typed(model_name="m"))
        await streamed(service, typed(model_name="m"))
        generate = inference_pb2.GenerateRequest(model="m", prompt="x")
        assert [r async for r in service.inference.Generate(generate)]
        await refusal(stub(service).ModelInfer(typed("", model_name="m")))
        told = (await stub(service).ModelStatistics(statistics_pb2.ModelStatisticsRequest())).model_stats
        (only,) = (await stub(service).ModelStatistics(statistics_pb2.ModelStatisticsRequest(name="m"))).model_stats
    assert [(model.name, model.inference_count) for model in told] == [("idle", 0), ("m", 3)]
    stats = only.inference_stats
    assert (stats.success.count, stats.fail.count, stats.queue.count, stats.compute_input.count) == (3, 1, 3, 3)
    assert stats.queue.ns == 3 * 250_000_000  # what the fake host says
    assert min(stats.success.ns, stats.fail.ns, stats.compute_input.ns) > 0
    assert time.time() - only.last_inference / 1e3 < 60


@asynchronous
async def test_reflection_names_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path, {}) as service:
        channel: Any = service.channel
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
        call = reflection.ServerReflectionInfo(iter([asked]))
        (file, *_) = (await call.read()).file_descriptor_response.file_descriptor_proto
        call.cancel()
    (told,) = descriptor_pb2.FileDescriptorProto.FromString(file).service
    assert "ModelStreamInfer" in {method.name for method in told.method}
