"""The gRPC services: what requests mean, what answers carry, and which status each mistake gets."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st
from tests.daemon_process import Client, refusal
from tests.fake_host import END, MANIFEST, FakeHost, Script, asynchronous, output, outputs, serving, tiny_codec

from dskapi.v1 import common_pb2, control_pb2, inference_pb2
from dskd.address import Address
from dskd.config import EngineUse, LogConfig, WatchConfig
from dskd.engine.request import FinishReason, InFlight, MadeToken, SamplingParams, StepOutput
from dskd.engine.step_times import StepKind
from dskd.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownModelError,
)
from dskd.log import configure_logging
from dskd.manager.events import SUBSCRIBER_BACKLOG
from dskd.manager.types import (
    Change,
    ChangeReport,
    HistoryEntry,
    ModeProof,
    SecondEngineState,
    SecondGraphState,
    SetReference,
    SwitchReport,
)
from dskd.monitor.config import MonitorConfig
from dskd.monitor.states import FallbackState
from dskd.monitor.types import ModeNoise, NoisePoint, NoiseSnapshot
from dskd.monitor.window import NoiseStatistics
from dskd.quant_config import MAX_BYTES
from dskd.rpc.one_at_a_time import MOST_WAITING
from dskd.rpc.parse import parse_request
from dskd.rpc.quant_request import QuantRequestReader
from dskd.text.tokenizer import TextCodec
from dskquant.errors import ParameterSetError, StoreError
from dskquant.modes import PrecisionMode
from dskquant.scheme import LayerRule

GenerateRequest = inference_pb2.GenerateRequest
GenerateResponse = inference_pb2.GenerateResponse


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return tiny_codec(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def host(codec: TextCodec) -> FakeHost:
    return FakeHost(codec, outputs("fine"))


@pytest.fixture
def json_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The lines logged so far, as the daemon writes them with `format = "json"`."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging(LogConfig(format="json"))
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def text_of(responses: list[GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


def ids_of(responses: list[GenerateResponse]) -> list[int]:
    return [token.id for response in responses for token in response.tokens]


async def answer(folder: Path, codec: TextCodec, script: Script, **request: Any) -> list[GenerateResponse]:
    async with serving(folder, {"m": FakeHost(codec, script)}) as service:
        return [response async for response in service.inference.Generate(GenerateRequest(prompt="hello", **request))]


# Answers


@asynchronous
async def test_every_token_carries_what_made_it(tmp_path: Path, codec: TextCodec) -> None:
    script = [
        output(104),
        output(105, mode=PrecisionMode.INT8),
        output(33, mode=PrecisionMode.FP32, finish=FinishReason.LENGTH),
    ]
    responses = await answer(tmp_path, codec, script)
    tokens = [token for response in responses for token in response.tokens]
    assert [(token.id, token.precision) for token in tokens] == [
        (104, common_pb2.PRECISION_MODE_INT4),
        (105, common_pb2.PRECISION_MODE_INT8),
        (33, common_pb2.PRECISION_MODE_FP32),
    ]
    assert {(token.generation, token.engine) for token in tokens} == {(1, "fake")}
    assert text_of(responses) == "hi!"


@asynchronous
async def test_the_last_response_alone_sums_up(tmp_path: Path, codec: TextCodec) -> None:
    *before, last = await answer(tmp_path, codec, outputs("abcd"))
    assert not any(r.finish_reason or r.HasField("usage") or r.HasField("timings") for r in before)
    assert last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.generated_tokens, last.usage.preemptions) == (5, 4, 3)
    assert last.timings.queue_ms == 250
    assert 0 < last.timings.time_to_first_token_ms <= last.timings.total_ms
    assert last.timings.tokens_per_second == pytest.approx(
        3e3 / (last.timings.total_ms - last.timings.time_to_first_token_ms)
    )


@asynchronous
async def test_all_responses_of_a_stream_name_one_request_and_the_model(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        first = [r async for r in service.inference.Generate(GenerateRequest(prompt="a"))]
        second = [r async for r in service.inference.Generate(GenerateRequest(prompt="a"))]
    assert {response.model for response in first} == {"m"}
    (one,), (other,) = ({r.request_id for r in first}, {r.request_id for r in second})
    assert one
    assert one != other
    assert [request.request_id for request in host.requests] == [one, other]


@asynchronous
async def test_the_end_of_text_token_is_told_but_has_no_text(tmp_path: Path, codec: TextCodec) -> None:
    script = [output(104), output(END, finish=FinishReason.END_OF_TEXT)]
    responses = await answer(tmp_path, codec, script)
    assert ids_of(responses) == [104, END]
    assert text_of(responses) == "h"
    assert responses[-1].finish_reason == inference_pb2.FINISH_REASON_END_OF_TEXT


@asynchronous
async def test_an_end_of_text_token_with_a_text_of_its_own_has_none_either(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [output(104), output(105, finish=FinishReason.END_OF_TEXT)])
    host.manifest = replace(MANIFEST, end_token_ids=(105,))
    async with serving(tmp_path, {"m": host}) as service:
        assert text_of([r async for r in service.inference.Generate(GenerateRequest(prompt="x"))]) == "h"
        request = GenerateRequest(prompt="x", ignore_eos=True)
        assert text_of([r async for r in service.inference.Generate(request)]) == "hi"


@asynchronous
async def test_text_comes_in_whole_characters(tmp_path: Path, codec: TextCodec) -> None:
    responses = await answer(tmp_path, codec, outputs("a€b"))
    assert [response.text for response in responses] == ["a", "", "", "€", "b"]
    assert [len(response.tokens) for response in responses] == [1, 1, 1, 1, 1]


@asynchronous
async def test_a_stop_string_ends_the_answer_before_it_and_frees_the_request(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [*outputs("one two three")[:-1], asyncio.Event()])
    async with serving(tmp_path, {"m": host}) as service:
        call = service.inference.Generate(GenerateRequest(prompt="x", stop=["two", "never"]))
        responses = [response async for response in call]
        assert await host.freed.get() == responses[0].request_id
    assert text_of(responses) == "one "
    assert bytes(ids_of(responses)) == b"one two"
    assert responses[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
    assert responses[-1].usage.generated_tokens == 7


@asynchronous
async def test_text_held_back_for_a_stop_string_comes_with_the_end(tmp_path: Path, codec: TextCodec) -> None:
    responses = await answer(tmp_path, codec, outputs("say tw"), stop=["two"])
    assert text_of(responses) == "say tw"
    assert responses[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH


@asynchronous
async def test_top_logprobs_come_with_the_text_of_each_token(tmp_path: Path, codec: TextCodec) -> None:
    token = MadeToken(104, PrecisionMode.INT4, 1, "fake", -0.5, ((104, -0.5), (0xE2, -1.5)))
    script = [StepOutput("", (token,)), output(END, finish=FinishReason.END_OF_TEXT)]
    first, last = await answer(tmp_path, codec, script, top_logprobs=2)
    assert first.tokens[0].logprob == -0.5
    assert [(top.id, top.logprob, top.text) for top in first.tokens[0].top_logprobs] == [
        (104, -0.5, "h"),
        (0xE2, -1.5, "\N{REPLACEMENT CHARACTER}"),
    ]
    assert not last.tokens[0].HasField("logprob")


# Requests


@asynchronous
async def test_the_engine_gets_what_the_request_says(tmp_path: Path, host: FakeHost) -> None:
    sampling = inference_pb2.Sampling(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.5)
    sampling.seed = 2**64 - 1
    request = GenerateRequest(
        model="m",
        tokens=inference_pb2.TokenIds(ids=[5, 6]),
        max_new_tokens=9,
        sampling=sampling,
        precision=common_pb2.PRECISION_MODE_FP16,
        top_logprobs=20,
    )
    async with serving(tmp_path, {"m": host}) as service:
        assert [r async for r in service.inference.Generate(request)]
    (asked,) = host.requests
    assert (asked.prompt, asked.max_new_tokens, asked.top_logprobs) == ((5, 6), 9, 20)
    assert asked.sampling == SamplingParams(0.5, 7, 0.25, 0.125, 1.5, 2**64 - 1)
    assert asked.precision is PrecisionMode.FP16
    assert asked.end_token_ids == {END}


def parsed(codec: TextCodec, **request: Any) -> Any:
    return parse_request(GenerateRequest(**{"prompt": "hello", **request}), "r", codec, MANIFEST).generation


def test_a_chat_is_rendered_by_the_template_of_the_model(codec: TextCodec) -> None:
    messages = [inference_pb2.ChatMessage(role="user", content="hé"), inference_pb2.ChatMessage(role="x", content="")]
    request = GenerateRequest(chat=inference_pb2.Chat(messages=messages))
    assert bytes(parse_request(request, "r", codec, MANIFEST).generation.prompt) == "user:hé;x:;".encode()


def test_defaults_are_greedy_512_tokens_and_a_fresh_seed(codec: TextCodec) -> None:
    one, other = parsed(codec), parsed(codec)
    assert (one.max_new_tokens, one.precision, one.sampling.temperature) == (512, None, 0.0)
    assert one.sampling.seed != other.sampling.seed


@pytest.mark.parametrize(("prompt_tokens", "wanted", "granted"), [(600, None, 400), (999, 50, 1), (5, 5000, 995)])
def test_an_answer_ends_with_the_context(
    codec: TextCodec, prompt_tokens: int, wanted: int | None, granted: int
) -> None:
    request = GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1] * prompt_tokens), max_new_tokens=wanted)
    assert parse_request(request, "r", codec, MANIFEST).generation.max_new_tokens == granted


def test_ignoring_the_end_of_text_leaves_no_token_to_end_at(codec: TextCodec) -> None:
    assert parsed(codec, ignore_eos=True).end_token_ids == frozenset()


WRONG_REQUESTS: list[tuple[GenerateRequest, str, str]] = [
    (GenerateRequest(), "input", "one of prompt, chat and tokens is needed"),
    (GenerateRequest(prompt=""), "prompt", "must not be empty"),
    (GenerateRequest(chat=inference_pb2.Chat()), "chat.messages", "must not be empty"),
    (
        GenerateRequest(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(content="x")])),
        "chat.messages[0].role",
        "must not be empty",
    ),
    (GenerateRequest(tokens=inference_pb2.TokenIds()), "tokens", "must not be empty"),
    (GenerateRequest(prompt="x" * 1000), "prompt", "1000 tokens; the context of the model holds 1000"),
    (
        GenerateRequest(prompt="x" * 5001),
        "prompt",
        "5001 bytes; the context of the model holds 1000 tokens of at most 5",
    ),
    (
        GenerateRequest(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="u", content="x" * 5000)])),
        "chat",
        "5001 bytes",
    ),
    (
        GenerateRequest(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="u")] * 10_001)),
        "chat.messages",
        "10001 messages; at most 10000",
    ),
    (GenerateRequest(prompt="x", max_new_tokens=0), "max_new_tokens", "0 is not allowed; allowed: at least 1"),
    (GenerateRequest(prompt="x", max_new_tokens=-1), "max_new_tokens", "-1 is not allowed"),
    (GenerateRequest(prompt="x", top_logprobs=21), "top_logprobs", "allowed: at least 0, at most 20"),
    (GenerateRequest(prompt="x", top_logprobs=-1), "top_logprobs", "-1 is not allowed"),
    (GenerateRequest(prompt="x", stop=["s"] * 17), "stop", "17 strings; at most 16"),
    (GenerateRequest(prompt="x", stop=["a", ""]), "stop[1]", "must not be empty"),
    (GenerateRequest(prompt="x", stop=["a", "s" * 1025]), "stop[1]", "1025 characters; at most 1024"),
    (GenerateRequest(prompt="x", precision=9), "precision", "9 is no precision mode; known: 1 (int4)"),  # type: ignore[arg-type]
    *(
        (GenerateRequest(prompt="x", sampling={name: value}), f"sampling.{name}", "allowed: ")
        for name, values in {
            "temperature": (-0.1, 10.5, math.nan, math.inf),
            "top_k": (-1,),
            "top_p": (0, 1.01, math.nan, -math.inf),
            "min_p": (-0.1, 1.1, math.nan),
            "repetition_penalty": (0, -1, 10.1, math.nan),
        }.items()
        for value in values
    ),
]


@asynchronous
async def test_every_wrong_field_is_named_and_leaves_the_daemon_serving(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        for request, field, description in WRONG_REQUESTS:
            code, _, details = await refusal(service.inference.Generate(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, request
            (violation,) = details[0].field_violations  # type: ignore[attr-defined]
            assert violation.field == field
            assert description in violation.description
        assert host.requests == []
        assert [r async for r in service.inference.Generate(GenerateRequest(prompt="x"))]


@asynchronous
async def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        for wrong in (-1, MANIFEST.vocab_size):
            request = GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1, wrong]))
            code, _, details = await refusal(service.inference.Generate(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details[0].field_violations[0].field.startswith("tokens.ids")  # type: ignore[attr-defined]


@given(value=st.floats(width=32))
def test_top_p_is_accepted_exactly_between_zero_and_one(codec: TextCodec, value: float) -> None:
    request = GenerateRequest(prompt="x", sampling=inference_pb2.Sampling(top_p=value))
    if 0 < value <= 1:
        assert parse_request(request, "r", codec, MANIFEST).generation.sampling.top_p == value
    else:
        with pytest.raises(InvalidArgumentError, match=r"^sampling\.top_p: "):
            parse_request(request, "r", codec, MANIFEST)


@pytest.mark.parametrize("raw", [b"\xff\xff", b"\x12\x01\xff"], ids=["no protobuf", "invalid UTF-8"])
@asynchronous
async def test_what_cannot_be_decoded_is_a_wrong_request(tmp_path: Path, host: FakeHost, raw: bytes) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        call: Any = service.channel.unary_stream("/dskapi.v1.Inference/Generate")
        code, message, details = await refusal(call(raw))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("request: cannot be decoded")
    assert details[0].field_violations[0].field == "request"  # type: ignore[attr-defined]


@asynchronous
async def test_a_message_over_the_limit_is_refused_and_the_next_one_served(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}, max_message_bytes=10_000) as service:
        code, message, _ = await refusal(service.inference.Generate(GenerateRequest(prompt="x" * 20_000)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "10000" in message
        assert [r async for r in service.inference.Generate(GenerateRequest(prompt="x"))]


# Which model


@asynchronous
async def test_an_unknown_model_is_not_found_and_the_known_are_named(tmp_path: Path, codec: TextCodec) -> None:
    async with serving(tmp_path, {"b": FakeHost(codec), "a": FakeHost(codec)}) as service:
        request = GenerateRequest(model="ä" * 5000, prompt="x")  # long, and long again in a header
        code, _, details = await refusal(service.inference.Generate(request))
    assert code is grpc.StatusCode.NOT_FOUND
    (info,) = details
    assert isinstance(info, error_details_pb2.ResourceInfo)
    assert info.resource_type == "model"
    assert info.resource_name.startswith("ää")
    assert info.description == "known: a, b"


@asynchronous
async def test_without_a_name_the_model_must_be_the_only_one(tmp_path: Path, codec: TextCodec) -> None:
    async with serving(tmp_path, {"a": FakeHost(codec, outputs("x")), "b": FakeHost(codec)}) as service:
        code, message, details = await refusal(service.inference.Generate(GenerateRequest(prompt="x")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details[0].field_violations[0].field == "model"  # type: ignore[attr-defined]
        assert message.endswith("there are: a (serving), b (serving)")
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="b"))
        assert {r.model async for r in service.inference.Generate(GenerateRequest(prompt="x"))} == {"a"}


@asynchronous
async def test_without_a_loaded_model_the_configured_ones_are_named(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="m"))
        code, message, _ = await refusal(service.inference.Generate(GenerateRequest(prompt="x")))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.endswith("no model is loaded: `dskctl load NAME`; configured: m (unloaded)")


@asynchronous
async def test_a_model_that_is_not_loaded_says_so(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="m"))
        code, message, details = await refusal(service.inference.Generate(GenerateRequest(model="m", prompt="x")))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert message == "model 'm' is unloaded; load it first"
    assert details[0].violations[0].subject == "models/m"  # type: ignore[attr-defined]


@asynchronous
async def test_a_model_that_is_loading_is_unavailable_for_now(tmp_path: Path, host: FakeHost) -> None:
    host.load_result = asyncio.Event()
    async with serving(tmp_path, {"m": host}) as service:
        for name in ("m", ""):
            code, message, details = await refusal(service.inference.Generate(GenerateRequest(model=name, prompt="x")))
            assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "model 'm' is loading: wait")
            assert [detail.retry_delay.seconds for detail in details] == [2]  # type: ignore[attr-defined]


@asynchronous
async def test_a_model_must_be_named_while_several_are_loading(tmp_path: Path, codec: TextCodec) -> None:
    hosts = {"a": FakeHost(codec), "b": FakeHost(codec)}
    for host in hosts.values():
        host.load_result = asyncio.Event()
    async with serving(tmp_path, hosts) as service:
        code, message, _ = await refusal(service.inference.Generate(GenerateRequest(prompt="x")))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.endswith("must be named, unless exactly one model is loaded; there are: a (loading), b (loading)")


@asynchronous
async def test_a_daemon_without_models_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, {}) as service:
        _, message, _ = await refusal(service.inference.Generate(GenerateRequest(prompt="x")))
    assert message.endswith("no model is loaded, and none is configured")


# Ends


@asynchronous
async def test_a_client_that_goes_away_frees_its_request(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [output(104), asyncio.Event()])
    async with serving(tmp_path, {"m": host}) as service:
        call = service.inference.Generate(GenerateRequest(prompt="x"))
        first = await call.read()
        call.cancel()
        assert await host.freed.get() == first.request_id


@asynchronous
async def test_a_client_that_reads_nothing_and_leaves_frees_its_request(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [output(104)] * 200_000)
    async with serving(tmp_path, {"m": host}) as service:
        call = service.inference.Generate(GenerateRequest(prompt="x"))
        await call.initial_metadata()
        call.cancel()
        await host.freed.get()


@asynchronous
async def test_a_deadline_frees_the_request(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [output(104), asyncio.Event()])
    async with serving(tmp_path, {"m": host}) as service:
        call = service.inference.Generate(GenerateRequest(prompt="x"), timeout=0.2)
        code, _, _ = await refusal(call)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await host.freed.get()


@asynchronous
async def test_requests_beyond_the_limit_are_told_when_to_come_back(tmp_path: Path, codec: TextCodec) -> None:
    held = asyncio.Event()
    host = FakeHost(codec, [output(104), held, output(105, finish=FinishReason.LENGTH)])
    async with serving(tmp_path, {"m": host}, max_concurrent_requests=1) as service:
        call = service.inference.Generate(GenerateRequest(prompt="x"))
        await call.read()
        code, _, (quota, retry) = await refusal(service.inference.Generate(GenerateRequest(prompt="x")))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert quota.violations[0].subject == "requests"  # type: ignore[attr-defined]
        assert retry.retry_delay.seconds == 1  # type: ignore[attr-defined]
        held.set()
        assert (await call.read()).text == "i"
        assert [r async for r in service.inference.Generate(GenerateRequest(prompt="x"))]


FAILURES: list[tuple[Exception, grpc.StatusCode, str, Message | None]] = [
    (
        FailedPreconditionError("modes/fp32", "no room"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "no room",
        error_details_pb2.PreconditionFailure(
            violations=[
                error_details_pb2.PreconditionFailure.Violation(
                    type="STATE", subject="modes/fp32", description="no room"
                )
            ]
        ),
    ),
    (
        StoreError("store/x: gone"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "store/x: gone",
        error_details_pb2.PreconditionFailure(
            violations=[
                error_details_pb2.PreconditionFailure.Violation(
                    type="MODEL", subject="StoreError", description="store/x: gone"
                )
            ]
        ),
    ),
    (
        ParameterSetError("a.scales: not above 0", rule="scale-positive", tensor="a"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "a.scales: not above 0",
        error_details_pb2.PreconditionFailure(
            violations=[
                error_details_pb2.PreconditionFailure.Violation(
                    type="PARAMETER_SET", subject="scale-positive", description="a.scales: not above 0"
                )
            ]
        ),
    ),
    (
        ResourceExhaustedError("kv_blocks", "none left"),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "none left",
        error_details_pb2.QuotaFailure(
            violations=[error_details_pb2.QuotaFailure.Violation(subject="kv_blocks", description="none left")]
        ),
    ),
    (
        UnknownModelError("q", ["p"]),
        grpc.StatusCode.NOT_FOUND,
        "no model 'q'; known: p",
        error_details_pb2.ResourceInfo(resource_type="model", resource_name="q", description="known: p"),
    ),
    (UnavailableError("going down"), grpc.StatusCode.UNAVAILABLE, "going down", None),
    (InternalError("the loop died"), grpc.StatusCode.INTERNAL, "the loop died", None),
]


@pytest.mark.parametrize(("error", "code", "message", "detail"), FAILURES, ids=lambda value: type(value).__name__)
@asynchronous
async def test_a_failure_in_mid_stream_keeps_its_status(
    tmp_path: Path, codec: TextCodec, error: Exception, code: grpc.StatusCode, message: str, detail: Message | None
) -> None:
    async with serving(tmp_path, {"m": FakeHost(codec, [output(104), error])}) as service:
        call = service.inference.Generate(GenerateRequest(prompt="x"))
        assert (await call.read()).text == "h"
        told_code, told_message, details = await refusal(call)
    assert (told_code, told_message) == (code, message)
    assert details == ([detail] if detail else [])


@asynchronous
async def test_a_retry_delay_is_told_to_the_millisecond(tmp_path: Path, codec: TextCodec) -> None:
    error = ResourceExhaustedError("memory", "full", retry_after_s=1.25)
    async with serving(tmp_path, {"m": FakeHost(codec, [error])}) as service:
        _, _, (_, retry) = await refusal(service.inference.Generate(GenerateRequest(prompt="x")))
    assert retry == error_details_pb2.RetryInfo(retry_delay={"seconds": 1, "nanos": 250_000_000})


@asynchronous
async def test_an_unexpected_error_tells_the_client_only_where_to_look(
    tmp_path: Path, codec: TextCodec, json_log: Callable[[], list[dict[str, Any]]]
) -> None:
    async with serving(tmp_path, {"m": FakeHost(codec, [ZeroDivisionError("secret")])}) as service:
        code, message, (info,) = await refusal(service.inference.Generate(GenerateRequest(model="m", prompt="x")))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message
    assert isinstance(info, error_details_pb2.ErrorInfo)
    error_id = info.metadata["error_id"]
    assert error_id in message
    (line,) = [line for line in json_log() if line["event"] == "unexpected error"]
    assert (line["error_id"], line["level"], line["model"]) == (error_id, "error", "m")
    assert "ZeroDivisionError: secret" in line["exception"]


@asynchronous
async def test_each_line_of_the_log_is_json_and_names_the_request(
    tmp_path: Path, host: FakeHost, json_log: Callable[[], list[dict[str, Any]]]
) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        (request_id,) = {r.request_id async for r in service.inference.Generate(GenerateRequest(prompt="private"))}
        logging.getLogger("some.library").warning("and %s too", "libraries")
    lines = json_log()
    assert all({"timestamp", "level", "event"} <= line.keys() for line in lines)
    (call,) = [line for line in lines if line["event"] == "call"]
    assert (call["request_id"], call["model"], call["code"]) == (request_id, "m", "OK")
    assert [line["level"] for line in lines if line["event"] == "and libraries too"] == ["warning"]
    assert "private" not in json.dumps(lines)


# Control


@asynchronous
async def test_a_switch_is_passed_on_and_its_report_returned(tmp_path: Path, host: FakeHost) -> None:
    host.switch_result = SwitchReport(PrecisionMode.INT4, PrecisionMode.FP32, 6, False, True, 12.5, 800.0, 812.0)
    request = control_pb2.SwitchPrecisionRequest(
        mode=common_pb2.PRECISION_MODE_FP32, in_flight=common_pb2.IN_FLIGHT_FINISH, wait=True
    )
    async with serving(tmp_path, {"m": host}) as service:
        response = await service.control.SwitchPrecision(request)
    assert response == control_pb2.SwitchPrecisionResponse(
        model="m",
        from_mode=common_pb2.PRECISION_MODE_INT4,
        to_mode=common_pb2.PRECISION_MODE_FP32,
        generation=6,
        resident=False,
        done=True,
        flip_us=12.5,
        prepare_ms=800.0,
        total_ms=812.0,
    )
    assert host.switches == [(PrecisionMode.FP32, InFlight.FINISH, "rpc:unix", True, False)]


@asynchronous
async def test_open_requests_migrate_unless_asked_otherwise(tmp_path: Path, host: FakeHost) -> None:
    host.switch_result = SwitchReport(PrecisionMode.INT4, PrecisionMode.INT8, 6, True, True, 1.0, 0.0, 1.0)
    async with serving(tmp_path, {"m": host}) as service:
        await service.control.SwitchPrecision(control_pb2.SwitchPrecisionRequest(mode=common_pb2.PRECISION_MODE_INT8))
    assert host.switches == [(PrecisionMode.INT8, InFlight.MIGRATE, "rpc:unix", False, False)]


@asynchronous
async def test_a_switch_may_pin_the_mode(tmp_path: Path, host: FakeHost) -> None:
    host.switch_result = SwitchReport(PrecisionMode.INT4, PrecisionMode.INT8, 6, True, True, 1.0, 0.0, 1.0)
    request = control_pb2.SwitchPrecisionRequest(mode=common_pb2.PRECISION_MODE_INT8, pin=True)
    async with serving(tmp_path, {"m": host}) as service:
        await service.control.SwitchPrecision(request)
    assert host.switches == [(PrecisionMode.INT8, InFlight.MIGRATE, "rpc:unix", False, True)]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (control_pb2.SwitchPrecisionRequest(), "mode"),
        (control_pb2.SwitchPrecisionRequest(mode=77), "mode"),  # type: ignore[arg-type]
        (control_pb2.SwitchPrecisionRequest(mode=common_pb2.PRECISION_MODE_INT8, in_flight=5), "in_flight"),  # type: ignore[arg-type]
    ],
)
@asynchronous
async def test_a_wrong_switch_names_its_field(
    tmp_path: Path, host: FakeHost, request_: control_pb2.SwitchPrecisionRequest, field: str
) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        code, _, details = await refusal(service.control.SwitchPrecision(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details[0].field_violations[0].field == field  # type: ignore[attr-defined]
    assert host.switches == []


ApplyConfigRequest = control_pb2.ApplyConfigRequest
CHANGED = ChangeReport(
    from_generation=5,
    to_generation=6,
    from_mode=PrecisionMode.INT4,
    to_mode=PrecisionMode.INT8,
    hash="new",
    parameter_set="set6",
    changed=True,
    done=True,
    proofs=(
        ModeProof(PrecisionMode.INT4, 0.5, 0.25, 0.75),
        ModeProof(PrecisionMode.INT8, None, 0.125, 1.0),
    ),
    phases_ms={"validate": 1.5, "build": 2.0},
    flip_us=12.5,
    total_ms=4.0,
)
CHANGE_RESPONSE = control_pb2.ChangeResponse(
    model="m",
    from_generation=5,
    to_generation=6,
    from_mode=common_pb2.PRECISION_MODE_INT4,
    to_mode=common_pb2.PRECISION_MODE_INT8,
    hash="new",
    parameter_set="set6",
    changed=True,
    done=True,
    proofs=[
        control_pb2.ModeProof(mode=common_pb2.PRECISION_MODE_INT4, kl_before=0.5, kl_after=0.25, agreement=0.75),
        control_pb2.ModeProof(mode=common_pb2.PRECISION_MODE_INT8, kl_after=0.125, agreement=1.0),
    ],
    phases_ms={"validate": 1.5, "build": 2.0},
    flip_us=12.5,
    total_ms=4.0,
)
LAYERS = """
[[layers]]
match = "*.down_proj.weight"
precision = "int8"
"""
DIGEST = "0123456789abcdef" * 4
SET = f'model = "m"\n[params]\nfile = "set"\nsha256 = "{DIGEST}"\n'


@asynchronous
async def test_a_config_becomes_one_change_and_its_report_is_returned(tmp_path: Path, host: FakeHost) -> None:
    host.change_result = CHANGED
    config = f'precision = "int8"\nin_flight = "finish"\n{SET}{LAYERS}'
    request = ApplyConfigRequest(config=config, base_directory="/srv/ü", dry_run=True, wait=True)
    async with serving(tmp_path, {"m": host}) as service:
        response = await service.control.ApplyConfig(request)
    assert response == CHANGE_RESPONSE
    assert not response.proofs[1].HasField("kl_before")
    change = Change(
        PrecisionMode.INT8,
        SetReference(Path("/srv/ü/set"), DIGEST),
        (LayerRule("*.down_proj.weight", PrecisionMode.INT8),),
        InFlight.FINISH,
    )
    assert host.changes == [(change, "rpc:unix", True, True)]


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ('precision = "fp32"', Change(mode=PrecisionMode.FP32)),
        (LAYERS, Change(layers=(LayerRule("*.down_proj.weight", PrecisionMode.INT8),))),
        ('[params]\nfile = "/x/set"', Change(parameters=SetReference(Path("/x/set")))),
    ],
    ids=["mode", "layers", "set"],
)
@asynchronous
async def test_what_a_config_does_not_say_stays_as_it_is(
    tmp_path: Path, host: FakeHost, config: str, change: Change
) -> None:
    host.change_result = CHANGED
    async with serving(tmp_path, {"m": host}) as service:
        await service.control.ApplyConfig(ApplyConfigRequest(config=f'model = "m"\n{config}'))
    assert host.changes == [(change, "rpc:unix", False, False)]


@pytest.mark.parametrize("config", ['model = "m"', 'model = "m"\nin_flight = "finish"', 'model = "m"\nlayers = []'])
@asynchronous
async def test_a_config_that_asks_for_nothing_is_refused(tmp_path: Path, host: FakeHost, config: str) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        code, _, details = await service.refusal(ApplyConfigRequest(config=config))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = details[0].field_violations
    assert violation.field == "config"
    assert violation.description.startswith("asks for nothing")
    assert host.changes == []


WRONG_CONFIGS: list[tuple[str, list[tuple[str, str]]]] = [
    ("model = ", [("config", "Invalid value (at end of document)")]),
    ("", [("model", "is missing")]),
    (
        'modle = "m"\nprecision = "int3"\n[params]\nsha256 = "12"\n[[layers]]\nprecision = "fp16"',
        [
            ("modle", "did you mean 'model'?"),
            ("model", "is missing"),
            ("precision", '"int3": allowed: "int4", "int8", "fp16", "fp32"'),
            ("params.file", "is missing"),
            ("layers[0].match", "is missing"),
            ("layers[0].precision", '"fp16": allowed: "int4", "int8"'),
        ],
    ),
    (f"{SET}".replace(DIGEST, DIGEST.upper()), [("params.sha256", "64 hexadecimal digits in lower case")]),
    ('model = "m"\n[params]\nfile = "a\\u0000b"', [("params.file", "a path has no NUL")]),
    ("#" * (MAX_BYTES + 1), [("config", f"{MAX_BYTES + 1} bytes; at most 512.0 KiB are allowed")]),
    ("a = " + "[" * 100_000, [("config", "nested")]),
]


@pytest.mark.parametrize(("config", "wrong"), WRONG_CONFIGS, ids=[str(index) for index in range(len(WRONG_CONFIGS))])
@asynchronous
async def test_every_wrong_field_of_a_config_is_named_with_its_problem(
    tmp_path: Path, host: FakeHost, config: str, wrong: list[tuple[str, str]]
) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        code, message, details = await service.refusal(ApplyConfigRequest(config=config))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    violations = details[0].field_violations
    assert sorted(violation.field for violation in violations) == sorted(field for field, _ in wrong)
    told = {violation.field: violation.description for violation in violations}
    for field, problem in wrong:
        assert problem in told[field]
        assert field in message
    assert host.changes == []


@pytest.mark.parametrize("name", ["k", "ключ-" * 20], ids=["short", "long"])
@asynchronous
async def test_thousands_of_wrong_fields_are_told_as_far_as_there_is_room(
    tmp_path: Path, host: FakeHost, name: str
) -> None:
    config = 'model = "m"\n' + "\n".join(f'"{name}{number}" = 1' for number in range(2000))
    async with serving(tmp_path, {"m": host}) as service:
        code, _, details = await service.refusal(ApplyConfigRequest(config=config))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    *told, rest = details[0].field_violations
    assert len(told) > 3
    assert rest.description == f"{2000 - len(told)} more fields are wrong"


@asynchronous
async def test_configs_are_read_one_at_a_time_and_only_a_few_may_wait(
    tmp_path: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, running, threads = threading.Event(), asyncio.Semaphore(0), []
    loop, read = asyncio.get_running_loop(), QuantRequestReader.read

    def read_slowly(reader: QuantRequestReader, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(running.release)
        assert release.wait(20)
        return read(reader, *arguments)

    monkeypatch.setattr(QuantRequestReader, "read", read_slowly)
    host.change_result = CHANGED
    request = ApplyConfigRequest(config='model = "m"\nprecision = "int8"')
    async with serving(tmp_path, {"m": host}) as service:
        try:
            first = asyncio.ensure_future(service.control.ApplyConfig(request))
            await running.acquire()
            calls = [service.control.ApplyConfig(request) for _ in range(MOST_WAITING + 1)]
            others = [asyncio.ensure_future(call) for call in calls]
            (refused,), waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            assert len(threads) == 1
        finally:
            release.set()
        code, message, details = await refusal(calls[others.index(refused)])
        assert (code, message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "9 quant configs wait already")
        assert details[1].retry_delay.ToMilliseconds() == 1000  # type: ignore[attr-defined]
        await asyncio.gather(first, *waiting)
        assert len(host.changes) == MOST_WAITING + 1
        await service.control.ApplyConfig(request)  # there is room again
    assert len(set(threads)) == 1


@asynchronous
async def test_a_config_for_a_model_that_does_not_serve_is_refused(tmp_path: Path, host: FakeHost) -> None:
    request = ApplyConfigRequest(config='model = "m"\nprecision = "int8"')
    other = ApplyConfigRequest(config='model = "other"\nprecision = "int8"')
    async with serving(tmp_path, {"m": host}) as service:
        code, message, details = await service.refusal(other)
        assert (code, message) == (grpc.StatusCode.NOT_FOUND, "no model 'other'; known: m")
        assert details[0].resource_name == "other"
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="m"))
        code, message, details = await service.refusal(request)
    assert (code, message) == (grpc.StatusCode.FAILED_PRECONDITION, "model 'm' is unloaded; load it first")
    assert details[0].violations[0].subject == "models/m"
    assert host.changes == []


@asynchronous
async def test_a_refused_change_keeps_its_status(tmp_path: Path, host: FakeHost) -> None:
    host.change_result = StoreError("scales of x: 3 values are not finite")
    async with serving(tmp_path, {"m": host}) as service:
        for request in (ApplyConfigRequest(config='model = "m"\nprecision = "int8"'), control_pb2.RollbackRequest()):
            code, message, details = await service.refusal(request)
            assert (code, message) == (grpc.StatusCode.FAILED_PRECONDITION, str(host.change_result))
            assert details[0].violations[0].type == "MODEL"


@pytest.mark.parametrize("allowed", [False, True])
@asynchronous
async def test_over_tcp_a_set_may_be_named_only_where_paths_are_allowed(
    tmp_path: Path, host: FakeHost, allowed: bool
) -> None:
    host.change_result = CHANGED
    listen = (Address(path=tmp_path / "dskd.sock"), Address(host="127.0.0.1", port=0))
    async with serving(tmp_path, {"m": host}, listen=listen, allow_load_from_path=allowed) as service:
        async with grpc.aio.insecure_channel(str(service.daemon.addresses[1])) as channel:
            remote = Client(channel)
            request = ApplyConfigRequest(config=SET, base_directory="/srv")
            if allowed:
                assert (await remote.control.ApplyConfig(request)).to_generation == 6
            else:
                code, message, details = await remote.refusal(request)
                assert code is grpc.StatusCode.FAILED_PRECONDITION
                assert "unix socket" in message
                assert "allow_load_from_path" in message
                assert details[0].violations[0].subject == "server.allow_load_from_path"
            assert len(host.changes) == allowed
            await remote.control.ApplyConfig(ApplyConfigRequest(config=f'model = "m"{LAYERS}'))
        assert (await service.control.ApplyConfig(request)).to_generation == 6  # over the unix socket
    assert len(host.changes) == 2 + allowed
    assert host.changes[-2][1].startswith("rpc:ipv4:127.0.0.1:")


@pytest.mark.parametrize("directory", [".", "sets", "~/sets", "unix:/sets"])
@asynchronous
async def test_a_base_directory_must_be_absolute(tmp_path: Path, host: FakeHost, directory: str) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        code, _, details = await service.refusal(ApplyConfigRequest(config=SET, base_directory=directory))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = details[0].field_violations
    assert (violation.field, violation.description) == ("base_directory", f"{directory!r} must be absolute")


@pytest.mark.parametrize("file", ["set", "../set", "./x/../set"])
@asynchronous
async def test_without_a_directory_to_start_from_a_set_needs_an_absolute_path(
    tmp_path: Path, host: FakeHost, file: str
) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        code, _, details = await service.refusal(ApplyConfigRequest(config=SET.replace("set", file, 1)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = details[0].field_violations
    assert violation.field == "params.file"
    assert violation.description.startswith(f"must be absolute: {str(Path(file))!r}")
    assert host.changes == []


def test_paths_start_at_the_watched_directory_unless_the_request_says_where() -> None:
    reader = QuantRequestReader(watched=Path("/etc/dskd/quant.d"), allow_paths=False)
    for directory, expected in (("", "/etc/dskd/quant.d/set"), ("/srv", "/srv/set")):
        config = reader.read(ApplyConfigRequest(config=SET, base_directory=directory), "unix:")
        assert config.params is not None
        assert config.params.file == Path(expected)


@asynchronous
async def test_a_daemon_that_watches_a_directory_lets_paths_start_there(tmp_path: Path, host: FakeHost) -> None:
    host.change_result = CHANGED
    watched = tmp_path / "quant.d"
    watched.mkdir()
    watch = WatchConfig(directory=watched)
    async with serving(tmp_path, {"m": host}, watch, state_dir=tmp_path / "state") as service:
        await service.control.ApplyConfig(ApplyConfigRequest(config=SET))
    ((change, *_),) = host.changes
    assert change.parameters == SetReference(watched / "set", DIGEST)


@pytest.mark.parametrize(("asked", "wanted"), [(0, None), (3, 3), (2**63, 2**63)])
@asynchronous
async def test_a_rollback_is_passed_on_and_its_report_returned(
    tmp_path: Path, host: FakeHost, asked: int, wanted: int | None
) -> None:
    host.change_result = CHANGED
    request = control_pb2.RollbackRequest(generation=asked, in_flight=common_pb2.IN_FLIGHT_FINISH, wait=True)
    async with serving(tmp_path, {"m": host}) as service:
        assert await service.control.Rollback(request) == CHANGE_RESPONSE
        await service.control.Rollback(control_pb2.RollbackRequest(model="m"))
    assert host.rollbacks == [
        (wanted, InFlight.FINISH, "rpc:unix", True),
        (None, InFlight.MIGRATE, "rpc:unix", False),
    ]


@asynchronous
async def test_a_wrong_rollback_names_what_is_wrong(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        _, _, details = await service.refusal(control_pb2.RollbackRequest(in_flight=7))  # type: ignore[arg-type]
        assert details[0].field_violations[0].field == "in_flight"
        code, _, _ = await service.refusal(control_pb2.RollbackRequest(model="n"))
        assert code is grpc.StatusCode.NOT_FOUND
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="m"))
        code, _, _ = await service.refusal(control_pb2.RollbackRequest(model="m"))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert host.rollbacks == []


@asynchronous
async def test_the_status_shows_the_generations_a_rollback_can_return_to(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        model = await service.model()
    assert model.parameter_set == "set5"
    active, older = model.generations
    assert (active.number, active.hash, active.parameter_set) == (5, "abc", "set5")
    assert (active.active, active.resident, older.active, older.resident) == (True, True, False, False)
    assert active.committed.ToMilliseconds() == 1_700_000_000_500
    assert dict(active.kl) == {"int4": 0.25, "int8": 0.5}
    assert (older.number, older.parameter_set, dict(older.kl)) == (3, "set3", {})


@asynchronous
async def test_the_history_tells_generations_sets_and_proofs(tmp_path: Path, host: FakeHost) -> None:
    entry = HistoryEntry(
        "m", "apply", "watch:a.toml", "committed", generation=6, from_generation=5, parameter_set="set6"
    )
    async with serving(tmp_path, {"m": host}) as service:
        service.daemon.history.append(replace(entry, proofs=CHANGED.proofs))
        history = await service.control.GetHistory(control_pb2.GetHistoryRequest(model="m", limit=1))
    (told,) = history.entries
    assert (told.from_generation, told.generation, told.parameter_set) == (5, 6, "set6")
    assert told.proofs == CHANGE_RESPONSE.proofs


NAN = math.nan
INT4_NOISE = ModeNoise(
    mode=PrecisionMode.INT4,
    state=FallbackState.TRIPPED,
    cause="noise",
    trips=2,
    threshold=0.5,
    statistics=NoiseStatistics(64, 1, 0.75, 0.5, 1.0, 0.25, 1.5, 3.0, 0.875),
    total_samples=2**40,
    non_finite=3,
    evidence=12.5,
    evidence_needed=11.5,
    entropy=2.5,
    margin=1.25,
    unique_ngrams=0.75,
    latest=(NoisePoint(1_700_000_000.25, 0.5, True, 5), NoisePoint(1_700_000_001.5, math.inf, False, 6)),
)
INT8_NOISE = ModeNoise(
    mode=PrecisionMode.INT8,
    state=FallbackState.HEALTHY,
    cause="",
    trips=0,
    threshold=None,
    statistics=NoiseStatistics(0, 0, NAN, NAN, NAN, NAN, NAN, NAN, NAN),
    total_samples=0,
    non_finite=0,
    evidence=0.0,
    evidence_needed=11.5,
    entropy=NAN,
    margin=NAN,
    unique_ngrams=NAN,
    latest=(),
)
NOISE = NoiseSnapshot(
    generation=6,
    reference=PrecisionMode.FP32,
    modes=(INT4_NOISE, INT8_NOISE),
    fallback=PrecisionMode.FP16,
    lowered=True,
    pin=PrecisionMode.INT4,
    escalated_requests=4,
)


@asynchronous
async def test_the_noise_of_a_model_is_told_whole(tmp_path: Path, host: FakeHost) -> None:
    host.noise_result = NOISE
    async with serving(tmp_path, {"m": host}) as service:
        response = await service.control.GetNoise(control_pb2.GetNoiseRequest(samples=2))
    assert host.noise_samples == [2]
    assert (response.model, response.generation, response.escalated_requests, response.lowered) == ("m", 6, 4, True)
    assert (response.reference, response.fallback, response.pin) == (
        common_pb2.PRECISION_MODE_FP32,
        common_pb2.PRECISION_MODE_FP16,
        common_pb2.PRECISION_MODE_INT4,
    )
    first, second = response.modes[0].latest
    assert (first.time.ToMilliseconds(), first.kl, first.agrees, first.generation) == (1_700_000_000_250, 0.5, True, 5)
    assert (second.time.ToMilliseconds(), second.kl, second.agrees, second.generation) == (
        1_700_000_001_500,
        math.inf,
        False,
        6,
    )
    response.modes[0].ClearField("latest")
    assert response.modes[0] == control_pb2.ModeNoise(
        mode=common_pb2.PRECISION_MODE_INT4,
        state=control_pb2.FALLBACK_STATE_TRIPPED,
        cause="noise",
        trips=2,
        threshold=0.5,
        samples=64,
        mean_kl=0.75,
        low=0.5,
        high=1.0,
        p50=0.25,
        p90=1.5,
        p99=3.0,
        agreement=0.875,
        total_samples=2**40,
        non_finite=3,
        evidence=12.5,
        evidence_needed=11.5,
        entropy=2.5,
        margin=1.25,
        unique_ngrams=0.75,
    )


@asynchronous
async def test_what_the_monitor_does_not_know_is_unset_or_nan(tmp_path: Path, host: FakeHost) -> None:
    host.noise_result = replace(NOISE, reference=None, modes=(INT8_NOISE,), fallback=None, lowered=False, pin=None)
    async with serving(tmp_path, {"m": host}) as service:
        response = await service.control.GetNoise(control_pb2.GetNoiseRequest(model="m"))
    unspecified = common_pb2.PRECISION_MODE_UNSPECIFIED
    assert (response.reference, response.fallback, response.pin) == (unspecified,) * 3
    (mode,) = response.modes
    assert not any(mode.HasField(field) for field in ("threshold", "low", "high"))
    figures = (mode.mean_kl, mode.p50, mode.p90, mode.p99, mode.agreement, mode.entropy, mode.margin)
    assert all(map(math.isnan, (*figures, mode.unique_ngrams)))


@pytest.mark.parametrize(("monitor", "allowed"), [(None, MonitorConfig().window), (MonitorConfig(window=40), 40)])
@asynchronous
async def test_no_more_samples_can_be_asked_for_than_the_window_of_the_model_has(
    tmp_path: Path, host: FakeHost, monitor: MonitorConfig | None, allowed: int
) -> None:
    host.noise_result = NOISE
    async with serving(tmp_path, {"m": host}, monitor=monitor) as service:
        await service.control.GetNoise(control_pb2.GetNoiseRequest(samples=allowed))
        for samples in (-1, allowed + 1):
            code, message, details = await refusal(
                service.control.GetNoise(control_pb2.GetNoiseRequest(samples=samples))
            )
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details[0].field_violations[0].field == "samples"  # type: ignore[attr-defined]
            assert message.endswith(f"{samples} is not allowed; allowed: 0 to {allowed}")
    assert host.noise_samples == [allowed]


@asynchronous
async def test_the_noise_of_a_model_that_is_unknown_or_not_loaded_is_refused(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        code, *_ = await refusal(service.control.GetNoise(control_pb2.GetNoiseRequest(model="n")))
        assert code is grpc.StatusCode.NOT_FOUND
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="m"))
        code, *_ = await refusal(service.control.GetNoise(control_pb2.GetNoiseRequest(model="m")))
        assert code is grpc.StatusCode.FAILED_PRECONDITION


@asynchronous
async def test_the_status_shows_the_daemon_and_its_loaded_models(tmp_path: Path, host: FakeHost) -> None:
    broken = FakeHost(host.codec)
    broken.load_result = StoreError("no such store")
    async with serving(tmp_path, {"m": host, "broken": broken}) as service:
        status = await service.control.GetStatus(control_pb2.GetStatusRequest())
    failed, model = status.models
    assert status.pid > 0
    assert status.rss_bytes > 1 << 20
    assert status.available_bytes > 0
    assert (failed.name, failed.state, failed.reason) == ("broken", control_pb2.MODEL_STATE_FAILED, "no such store")
    assert (model.name, model.state, model.engine, model.hash) == ("m", control_pb2.MODEL_STATE_SERVING, "fake", "abc")
    assert (model.mode, model.generation) == (common_pb2.PRECISION_MODE_INT4, 5)
    assert (model.kv_blocks_total, model.kv_blocks_free, model.kv_cache_bytes) == (10, 4, 640)
    assert (model.running_requests, model.waiting_requests) == (0, 2)
    assert (model.context_length, model.architecture, model.path) == (1000, "llama", str(tmp_path / "m"))
    assert [(mode.mode, mode.resident) for mode in model.modes] == [(1, True), (2, False), (3, False), (4, False)]
    assert {(mode.bytes, mode.tokens, mode.requests) for mode in model.modes} == {(100, 7, 1)}


@asynchronous
async def test_the_status_tells_what_the_second_engine_does(tmp_path: Path, host: FakeHost) -> None:
    graphs = (SecondGraphState(PrecisionMode.INT4, 500, ""), SecondGraphState(PrecisionMode.FP16, 0, "not there"))
    times = {
        StepKind("other", PrecisionMode.INT8, 1): 0.25,
        StepKind("other", PrecisionMode.INT4, 2): 0.0625,
        StepKind("fake", PrecisionMode.INT4, 2): 0.125,
    }
    async with serving(tmp_path, {"m": host}) as service:
        (model,) = (await service.control.GetStatus(control_pb2.GetStatusRequest())).models
        assert not model.HasField("second_engine")
        host.second = SecondEngineState("other", EngineUse.AUTO, "", 8, graphs, times)
        (model,) = (await service.control.GetStatus(control_pb2.GetStatusRequest())).models
    second = model.second_engine
    assert (second.name, second.use, second.reason) == ("other", "auto", "")
    assert (second.slots_total, second.slots_used, second.moves) == (8, 1, 2)
    assert dict(second.tokens) == {"fake": 3, "other": 4}
    assert [(graph.mode, graph.bytes, graph.reason) for graph in second.graphs] == [(1, 500, ""), (3, 0, "not there")]
    told = [(step.engine, step.mode, step.rows, step.ms) for step in second.step_times]
    assert told == [("fake", 1, 2, 125.0), ("other", 1, 2, 62.5), ("other", 2, 1, 250.0)]


@asynchronous
async def test_the_status_of_one_model_needs_a_known_name(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        status = await service.control.GetStatus(control_pb2.GetStatusRequest(model="m"))
        assert [model.name for model in status.models] == ["m"]
        code, _, _ = await refusal(service.control.GetStatus(control_pb2.GetStatusRequest(model="n")))
        assert code is grpc.StatusCode.NOT_FOUND


@asynchronous
async def test_the_list_shows_unloaded_models_too(tmp_path: Path, codec: TextCodec) -> None:
    async with serving(tmp_path, {"a": FakeHost(codec), "b": FakeHost(codec)}) as service:
        for name in "ab":
            await service.control.UnloadModel(control_pb2.UnloadModelRequest(model=name))
        (tmp_path / "b").mkdir()
        MANIFEST.write(tmp_path / "b")  # a's store is gone
        a, b = (await service.control.ListModels(control_pb2.ListModelsRequest())).models
    assert {a.state, b.state} == {control_pb2.MODEL_STATE_UNLOADED}
    assert (a.architecture, a.context_length) == ("", 0)
    assert (b.architecture, b.context_length, b.parameters) == ("llama", 1000, 12_345)


@asynchronous
async def test_a_model_can_be_unloaded_and_loaded_again(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}, grace_s=4.0) as service:
        unloaded = await service.control.UnloadModel(control_pb2.UnloadModelRequest())
        assert (unloaded.model, unloaded.aborted_requests, host.graces) == ("m", 0, [4.0])
        loaded = await service.control.LoadModel(control_pb2.LoadModelRequest(model="m"))
        assert loaded.model.state == control_pb2.MODEL_STATE_SERVING
        history = await service.control.GetHistory(control_pb2.GetHistoryRequest())
    assert [(entry.kind, entry.outcome, entry.actor) for entry in history.entries] == [
        ("load", "committed", "rpc:unix"),
        ("unload", "committed", "rpc:unix"),
        ("load", "committed", "config"),
    ]
    assert (history.entries[0].to_mode, history.entries[1].from_mode) == (1, 1)


@asynchronous
async def test_of_a_long_history_the_newest_that_fit_into_a_message_are_sent(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}, max_message_bytes=50_000) as service:
        for number in range(100):
            reason = f"{number} " + "\u20ac" * 1_000
            service.daemon.history.append(HistoryEntry("m", "apply", "test", "rejected", reason))
        history = await service.control.GetHistory(control_pb2.GetHistoryRequest(limit=10_000))
    told = [int(entry.reason.split()[0]) for entry in history.entries]
    assert told == list(range(99, 99 - len(told), -1))
    assert 50_000 - 3_200 < history.ByteSize() <= 50_000


@asynchronous
async def test_half_a_surrogate_pair_breaks_no_answer_and_no_stream(tmp_path: Path, host: FakeHost) -> None:
    odd, told = "x\ud800", "x\\ud800"
    host.change_result = StoreError(odd)
    async with serving(tmp_path, {"m": host}) as service:
        watching = service.control.WatchEvents(control_pb2.WatchEventsRequest())
        await watching.initial_metadata()
        service.daemon.history.append(HistoryEntry(odd, "apply", odd, "rejected", odd, phases_ms={odd: 1.0}))
        service.daemon.events.publish("apply.rejected", "m", odd, reason=odd, names=[odd], kl={odd: 1.0})
        (entry,) = (await service.control.GetHistory(control_pb2.GetHistoryRequest(limit=1))).entries
        event = await watching.read()
        request = ApplyConfigRequest(config='model = "m"\nprecision = "int8"')
        code, message, _ = await refusal(service.control.ApplyConfig(request))
        watching.cancel()
    assert (entry.model, entry.actor, entry.reason, dict(entry.phases_ms)) == (told, told, told, {told: 1.0})
    assert (event.message, event.fields["reason"], event.fields["names"][0]) == (told, told, told)
    assert (code, message) == (grpc.StatusCode.FAILED_PRECONDITION, told)


@asynchronous
async def test_what_cannot_be_loaded_or_unloaded_now_says_why(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        code, message, _ = await refusal(service.control.LoadModel(control_pb2.LoadModelRequest(model="m")))
        assert (code, message) == (grpc.StatusCode.FAILED_PRECONDITION, "model 'm' is serving already")
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="m"))
        code, message, _ = await refusal(service.control.UnloadModel(control_pb2.UnloadModelRequest(model="m")))
        assert (code, message) == (grpc.StatusCode.FAILED_PRECONDITION, "model 'm' is not loaded but unloaded")
        code, _, _ = await refusal(service.control.LoadModel(control_pb2.LoadModelRequest(model="n")))
        assert code is grpc.StatusCode.NOT_FOUND
        code, _, details = await refusal(service.control.LoadModel(control_pb2.LoadModelRequest()))
        assert details[0].field_violations[0].field == "model"  # type: ignore[attr-defined]


@asynchronous
async def test_a_failed_load_is_told_kept_in_history_and_can_be_repeated(tmp_path: Path, host: FakeHost) -> None:
    host.load_result = StoreError("store is damaged")
    async with serving(tmp_path, {"m": host}) as service:
        code, message, _ = await refusal(service.control.LoadModel(control_pb2.LoadModelRequest(model="m")))
        assert (code, message) == (grpc.StatusCode.FAILED_PRECONDITION, "store is damaged")
        host.load_result = None
        await service.control.LoadModel(control_pb2.LoadModelRequest(model="m"))
        history = await service.control.GetHistory(control_pb2.GetHistoryRequest(model="m", limit=2))
    assert [(entry.outcome, entry.reason) for entry in history.entries] == [
        ("committed", ""),
        ("rejected", "store is damaged"),
    ]


@asynchronous
async def test_loading_from_a_path_must_be_allowed(tmp_path: Path, host: FakeHost) -> None:
    request = control_pb2.LoadModelRequest(model="new", path="/store")
    async with serving(tmp_path, {"m": host}) as service:
        code, message, details = await refusal(service.control.LoadModel(request))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "[server] allow_load_from_path" in message
    assert details[0].violations[0].subject == "server.allow_load_from_path"  # type: ignore[attr-defined]


@asynchronous
async def test_a_model_loaded_from_a_path_is_known_from_then_on(tmp_path: Path, codec: TextCodec) -> None:
    hosts = {"m": FakeHost(codec)}
    async with serving(tmp_path, hosts, allow_load_from_path=True) as service:
        hosts["new"] = FakeHost(codec)
        for wrong, field in (("x/y", "model"), ("m", "model")):
            request = control_pb2.LoadModelRequest(model=wrong, path="/store")
            _, _, details = await refusal(service.control.LoadModel(request))
            assert details[0].field_violations[0].field == field  # type: ignore[attr-defined]
        _, _, details = await refusal(service.control.LoadModel(control_pb2.LoadModelRequest(model="new", path="s")))
        assert details[0].field_violations[0].field == "path"  # type: ignore[attr-defined]
        loaded = await service.control.LoadModel(control_pb2.LoadModelRequest(model="new", path="/store"))
        assert (loaded.model.name, loaded.model.path) == ("new", "/store")
        listed = await service.control.ListModels(control_pb2.ListModelsRequest())
        assert [model.name for model in listed.models] == ["m", "new"]


@asynchronous
async def test_a_mistyped_path_does_not_keep_the_name(tmp_path: Path, codec: TextCodec) -> None:
    hosts = {"m": FakeHost(codec)}
    async with serving(tmp_path, hosts, allow_load_from_path=True) as service:
        hosts["new"] = FakeHost(codec)
        hosts["new"].load_result = StoreError("no store")
        wrong = control_pb2.LoadModelRequest(model="new", path="/stroe")
        code, message, _ = await refusal(service.control.LoadModel(wrong))
        assert (code, message) == (grpc.StatusCode.FAILED_PRECONDITION, "no store")
        assert [entry.name for entry in service.daemon.registry.entries()] == ["m"]
        hosts["new"] = FakeHost(codec)
        await service.control.LoadModel(control_pb2.LoadModelRequest(model="new", path="/store"))
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="new"))
        hosts["new"] = FakeHost(codec)
        loaded = await service.control.LoadModel(control_pb2.LoadModelRequest(model="new", path="/other"))
        assert loaded.model.path == "/other"


@pytest.mark.parametrize("limit", [-1, 10_001])
@asynchronous
async def test_a_wrong_history_limit_is_refused(tmp_path: Path, host: FakeHost, limit: int) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        code, _, details = await refusal(service.control.GetHistory(control_pb2.GetHistoryRequest(limit=limit)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details[0].field_violations[0].field == "limit"  # type: ignore[attr-defined]


@asynchronous
async def test_a_watch_gets_every_event_after_its_metadata(tmp_path: Path, codec: TextCodec) -> None:
    async with serving(tmp_path, {"a": FakeHost(codec), "b": FakeHost(codec)}) as service:
        everything = service.control.WatchEvents(control_pb2.WatchEventsRequest())
        only_b = service.control.WatchEvents(control_pb2.WatchEventsRequest(model="b"))
        await everything.initial_metadata()
        await only_b.initial_metadata()
        service.daemon.events.publish("x.first", "a", "one", number=1, list=["u"], nested={"k": None})
        service.daemon.events.publish("x.second", "b", "two")
        first, second = await everything.read(), await everything.read()
        assert (first.kind, first.model, first.message) == ("x.first", "a", "one")
        assert dict(first.fields)["number"] == 1
        assert second.sequence == first.sequence + 1
        assert (await only_b.read()).kind == "x.second"
        everything.cancel()
        only_b.cancel()


@asynchronous
async def test_a_watch_that_is_too_slow_is_told_how_much_it_lost(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        watch = service.control.WatchEvents(control_pb2.WatchEventsRequest())
        await watch.initial_metadata()
        for number in range(SUBSCRIBER_BACKLOG + 7):  # without giving the watch a turn
            service.daemon.events.publish("x", "m", str(number))
        lost = await watch.read()
        assert (lost.kind, lost.fields["lost"]) == ("events.lost", 7)
        assert (await watch.read()).message == "7"
        watch.cancel()


@asynchronous
async def test_a_watch_of_an_unknown_model_is_refused(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        code, _, _ = await refusal(service.control.WatchEvents(control_pb2.WatchEventsRequest(model="n")))
    assert code is grpc.StatusCode.NOT_FOUND
