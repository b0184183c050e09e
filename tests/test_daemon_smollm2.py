"""A real model in a real daemon: precision switched under load, answers cancelled, wrong requests refused."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from tests.daemon_process import (
    MODEL,
    Answer,
    Client,
    DaemonProcess,
    asynchronous,
    connected,
    daemon_process,
    read,
    refusal,
)
from tests.golden_models import GOLDEN
from tokenizers import Tokenizer

from dskapi.v1 import control_pb2, inference_pb2
from dskapi.v1.common_pb2 import (
    IN_FLIGHT_FINISH,
    PRECISION_MODE_FP16,
    PRECISION_MODE_FP32,
    PRECISION_MODE_INT4,
    PRECISION_MODE_INT8,
    PRECISION_MODE_UNSPECIFIED,
    PrecisionMode,
)

MODES = (PRECISION_MODE_INT4, PRECISION_MODE_INT8, PRECISION_MODE_FP16, PRECISION_MODE_FP32)
STREAMS = 8
SWITCHES = 200
LENGTH = inference_pb2.FINISH_REASON_LENGTH
IDLE_WITHIN_S = 60.0
ROUNDING_MARGIN = 1e-3
"""Two tokens closer than this, in nats, may change places by rounding that depends on the size of the batch."""

PROMPTS = (
    "Once upon a time, in a village by the sea,",
    "The three most important things about baking bread are",
    "def fibonacci(n):\n",
    "Dear Sir or Madam, I am writing to you because",
    "In the year 1492,",
    "Question: What is the capital of France?\nAnswer:",
    "1, 2, 3, 5, 8, 13,",
    "The weather report for tomorrow: in the morning",
)


@pytest.fixture(scope="module")
def daemon(smollm2_store: Path) -> Iterator[DaemonProcess]:
    """All four modes are resident."""
    model = {
        "path": str(smollm2_store),
        "resident": ["int4", "int8", "fp16", "fp32"],
        "kv_cache_bytes": "64MiB",
    }
    with daemon_process({MODEL: model}) as process:
        yield process.start()
        assert process.stop() == 0


@pytest.fixture(scope="module")
def tokenizer(smollm2_store: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_store / "tokenizer.json"))


@dataclass
class Switching:
    """Switches made one after the other. `asked` and `told` are seconds of `time.monotonic`, one for each."""

    modes: list[PrecisionMode]  # the one before the first switch, and then one for each
    asked: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)

    async def run(self, client: Client, count: int, seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(count):
            self.asked.append(time.monotonic())
            report = await client.switch(chosen.choice(MODES))
            self.told.append(time.monotonic())
            assert report.done
            assert report.resident
            assert report.from_mode == self.modes[-1]
            self.modes.append(report.to_mode)

    def explains(self, answer: Answer) -> bool:
        """Whether the labels of `answer`, in order, are modes that served between two of its tokens' arrivals.

        A token is made by a mode whose switch had been asked for when it arrived, and by none that was replaced before
        the token ahead of it had arrived.
        """
        served = 0
        for label, before, arrived in zip(answer.modes, [0.0, *answer.arrived], answer.arrived, strict=False):
            served = max(served, sum(told < before for told in self.told))
            newest = sum(asked < arrived for asked in self.asked)
            served = next((index for index in range(served, newest + 1) if self.modes[index] == label), newest + 1)
            if served > newest:
                return False
        return True


async def switching_from_now(client: Client) -> Switching:
    return Switching([(await client.model()).mode])


def requests(seed: int) -> Iterator[tuple[str, int, inference_pb2.Sampling]]:
    """Prompts, lengths and samplings without end."""
    chosen = random.Random(seed)
    while True:
        sampling = inference_pb2.Sampling(temperature=chosen.choice((0.0, 0.8)), seed=chosen.randrange(2**32))
        yield chosen.choice(PROMPTS), chosen.randrange(8, 49), sampling


class OpenStream:
    """An answer that is read as it comes."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._changed = asyncio.Event()
        self.answer = Answer()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, client: Client, prompt: str = PROMPTS[0], **options: Any) -> OpenStream:
        """A stream that has its first token already."""
        stream = cls(client.stream(prompt, new=4000, **options))
        await stream.until(1)
        return stream

    async def _read(self) -> None:
        async for response in self._call:
            self.answer.add(response)
            self._changed.set()

    async def until(self, count: int) -> None:
        """Waits until so many tokens have come."""
        while len(self.answer.tokens) < count:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()


# Switches under load


@asynchronous
async def test_no_token_is_lost_or_wrongly_labelled_while_the_precision_changes(
    daemon: DaemonProcess, tokenizer: Tokenizer
) -> None:
    """Eight streams at any time, and 200 random switches between the four modes."""
    async with connected(daemon) as client:
        switching = await switching_from_now(client)
        switches = asyncio.create_task(switching.run(client, SWITCHES, seed=1))

        async def one_after_the_other(seed: int) -> list[tuple[int, Answer]]:
            answers = []
            for prompt, new, sampling in requests(seed):
                answers.append((new, await client.answer(prompt, new, sampling=sampling)))
                if switches.done():
                    break
            return answers

        streams = await asyncio.gather(*map(one_after_the_other, range(STREAMS)))
        await switches
        history = (await client.control.GetHistory(control_pb2.GetHistoryRequest(limit=SWITCHES))).entries
    assert [entry.to_mode for entry in reversed(history)] == switching.modes[1:]
    assert {(entry.kind, entry.outcome) for entry in history} == {("switch", "committed")}
    answers = [answer for stream in streams for answer in stream]
    for new, answer in answers:
        assert len(answer.tokens) == answer.last.usage.generated_tokens == new
        assert answer.last.finish_reason == LENGTH
        assert answer.text == tokenizer.decode(answer.ids)
        assert {(token.generation, token.engine) for token in answer.tokens} == {(1, "openvino")}
        assert switching.explains(answer)
    changed = sum(len(set(answer.modes)) > 1 for _, answer in answers)
    counts = Counter(mode for _, answer in answers for mode in answer.modes)
    print(f"{len(answers)} answers, {changed} of them by more than one mode; tokens by mode: {dict(counts)}")
    assert set(counts) == set(MODES)
    assert changed >= STREAMS


@asynchronous
async def test_a_request_with_its_own_precision_does_not_notice_switches(daemon: DaemonProcess) -> None:
    """Eight answers, two for each mode, with and without 200 random switches (and two answers that follow them)."""

    modes = MODES * 2

    async def all_answers(client: Client) -> list[Answer]:
        requests = zip(PROMPTS, modes, strict=True)
        return await asyncio.gather(*(client.answer(prompt, 40, precision=m, top_logprobs=2) for prompt, m in requests))

    async with connected(daemon) as client:
        quiet = await all_answers(client)
        switching = await switching_from_now(client)
        switches = asyncio.create_task(switching.run(client, SWITCHES, seed=2))
        rounds = []
        while not switches.done():
            followers = [asyncio.create_task(client.answer(new=40)) for _ in range(2)]
            rounds.append(await all_answers(client))
            await asyncio.gather(*followers)
        await switches
    differences = []
    for switched in rounds:
        for mode, before, after in zip(modes, quiet, switched, strict=True):
            assert set(after.modes) == {mode}
            differences += margins_at_first_difference(before, after)
    print(f"{len(rounds) * STREAMS} answers compared, {len(differences)} differ, at margins of {differences}")
    assert all(margin < ROUNDING_MARGIN for margin in differences)


def margins_at_first_difference(one: Answer, other: Answer) -> list[float]:
    """The top-1 margin, in nats, of `one` at its first token that `other` has not; empty when they are equal."""
    assert len(one.tokens) == len(other.tokens)
    for token, its_other in zip(one.tokens, other.tokens, strict=True):
        if token.id != its_other.id:
            best, second = token.top_logprobs
            return [best.logprob - second.logprob]
    return []


@pytest.mark.parametrize("chat", [0, 1])
@asynchronous
async def test_the_reference_mode_answers_as_transformers_does(daemon: DaemonProcess, chat: int) -> None:
    """64 greedy tokens; tests/golden/make_golden.py has asked transformers."""
    golden = np.load(GOLDEN / "smollm2.npz")
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=golden[f"chat{chat}"].tolist()),
        precision=PRECISION_MODE_FP32,
        max_new_tokens=64,
        ignore_eos=True,
    )
    async with connected(daemon) as client:
        answer = await client.complete(request)
    assert answer.ids == golden[f"answer{chat}"].tolist()


# Switch reports


ALL_PAIRS = tuple(MODES[number] for number in (0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0))
"""A way through the modes that takes each of the twelve steps from one mode to another once."""


@asynchronous
async def test_a_switch_between_resident_modes_is_a_flip_effective_at_the_next_token(daemon: DaemonProcess) -> None:
    """All twelve ordered pairs, three times, while eight streams are open: at most 100 microseconds in the median."""
    async with connected(daemon) as client:
        await client.switch(ALL_PAIRS[0])
        streams = [await OpenStream.start(client, prompt) for prompt in PROMPTS]
        reports = []
        for mode in ALL_PAIRS[1:] * 3:
            reports.append(await client.switch(mode))
            for stream, count in [(stream, len(stream.answer.tokens)) for stream in streams]:
                await stream.until(count + 1)
                assert stream.answer.modes[count] == mode
        for stream in streams:
            stream.close()
    steps = itertools.pairwise(ALL_PAIRS + ALL_PAIRS[1:] + ALL_PAIRS[1:])
    assert [(report.from_mode, report.to_mode) for report in reports] == list(steps)
    assert all(report.resident and report.done and report.prepare_ms == 0 for report in reports)
    flips = [report.flip_us for report in reports]
    print(f"{len(flips)} flips: median {statistics.median(flips):.1f} us, longest {max(flips):.1f} us")
    assert statistics.median(flips) <= 100


@asynchronous
async def test_open_answers_can_finish_in_their_mode(daemon: DaemonProcess) -> None:
    async with connected(daemon) as client:
        await client.switch(PRECISION_MODE_INT4)
        old = await OpenStream.start(client)
        await client.switch(PRECISION_MODE_FP16, IN_FLIGHT_FINISH)
        new = await client.answer(new=16)
        await old.until(len(old.answer.tokens) + 8)
        old.close()
    assert set(new.modes) == {PRECISION_MODE_FP16}
    assert set(old.answer.modes) == {PRECISION_MODE_INT4}


# Modes that are not resident


@pytest.fixture(scope="module")
def lean_daemon(smollm2_store: Path) -> Iterator[DaemonProcess]:
    """INT4 and INT8 are resident; the others are released when they have not been used for a quarter of a second."""
    model = {"path": str(smollm2_store), "kv_cache_bytes": "64MiB", "on_demand_ttl_s": 0.25}
    with daemon_process({MODEL: model}) as process:
        yield process.start()
        assert process.stop() == 0


async def until_event(events: AsyncIterator[control_pb2.Event], kind: str) -> control_pb2.Event:
    async for event in events:
        if event.kind == kind:
            return event
    raise AssertionError(f"no {kind}")


@asynchronous
async def test_the_old_mode_serves_on_while_another_is_prepared(lean_daemon: DaemonProcess) -> None:
    """And when the new one is no longer used, its memory is given back."""
    async with connected(lean_daemon) as client, client.watching() as events:
        before = await client.status()
        stream = await OpenStream.start(client)
        asked = len(stream.answer.tokens)
        report = await client.switch(PRECISION_MODE_FP32)
        told = len(stream.answer.tokens)
        await stream.until(told + 4)
        assert told > asked
        assert set(stream.answer.modes[:told]) == {PRECISION_MODE_INT4}
        assert set(stream.answer.modes[told:]) == {PRECISION_MODE_FP32}
        assert (report.done, report.resident) == (True, False)
        assert 0 < report.prepare_ms <= report.total_ms
        during = await client.status()
        assert residents(during) == {PRECISION_MODE_INT4, PRECISION_MODE_INT8, PRECISION_MODE_FP32}
        await client.switch(PRECISION_MODE_INT4)
        await until_event(events, "mode.released")
        after = await client.status()
        stream.close()
    rss = [status.rss_bytes >> 20 for status in (before, during, after)]
    print(f"RSS before, with FP32, after: {rss} MiB; {told - asked} tokens of the old mode meanwhile")
    assert residents(after) == residents(before) == {PRECISION_MODE_INT4, PRECISION_MODE_INT8}
    assert after.rss_bytes - before.rss_bytes < (during.rss_bytes - before.rss_bytes) / 2


def residents(status: control_pb2.GetStatusResponse) -> set[PrecisionMode]:
    """The resident modes of the only model."""
    (model,) = status.models
    return {mode.mode for mode in model.modes if mode.resident}


@asynchronous
async def test_a_switch_may_go_on_in_the_background(lean_daemon: DaemonProcess) -> None:
    async with connected(lean_daemon) as client, client.watching() as events:
        report = await client.switch(PRECISION_MODE_FP16, wait=False)
        assert (report.done, report.resident) == (False, False)
        assert (await client.model()).change_in_progress == "preparing fp16"
        committed = await until_event(events, "switch.committed")
        assert dict(committed.fields)["to"] == "fp16"
        assert set((await client.answer()).modes) == {PRECISION_MODE_FP16}
        await client.switch(PRECISION_MODE_INT4)
        await until_event(events, "mode.released")


@asynchronous
async def test_a_request_brings_in_the_mode_it_asks_for(lean_daemon: DaemonProcess) -> None:
    """For itself alone, and for as long as it lasts."""
    async with connected(lean_daemon) as client, client.watching() as events:
        answer = await client.answer(precision=PRECISION_MODE_FP32)
        assert set(answer.modes) == {PRECISION_MODE_FP32}
        assert (await client.model()).mode == PRECISION_MODE_INT4
        await until_event(events, "mode.released")


# Cancelled answers


CANCELLED = 1_000
AT_ONCE = 32


@asynchronous
async def test_cancelled_answers_leave_nothing_behind(daemon: DaemonProcess) -> None:
    """Before the first token, in mid-answer, or by a deadline; long and short prompts; with and without their own mode.

    All blocks are free again, and the memory of the daemon stays what it was after the first 200.
    """
    async with connected(daemon) as client:
        await client.switch(PRECISION_MODE_INT4)
        chosen = random.Random(3)
        turns = asyncio.Semaphore(AT_ONCE)

        async def cancel_one() -> None:
            async with turns:
                await cancelled_somewhere(client, chosen)

        await asyncio.gather(*(cancel_one() for _ in range(CANCELLED // 5)))
        settled = (await client.status()).rss_bytes
        await asyncio.gather(*(cancel_one() for _ in range(CANCELLED - CANCELLED // 5)))
        model = await idle_model(client)
        rss = (await client.status()).rss_bytes
        assert (await client.answer()).last.finish_reason == LENGTH
    print(f"RSS {settled >> 20} MiB after {CANCELLED // 5} cancelled answers, {rss >> 20} MiB after {CANCELLED}")
    assert model.kv_blocks_free == model.kv_blocks_total > 0
    assert abs(rss - settled) <= 0.1 * settled


async def cancelled_somewhere(client: Client, chosen: random.Random) -> None:
    """A stream that its client leaves after up to six tokens, or that its deadline cuts within a third of a second."""
    prompt = chosen.choice(PROMPTS) * (30 if chosen.random() < 0.03 else 1)
    own = PRECISION_MODE_INT8 if chosen.random() < 0.1 else PRECISION_MODE_UNSPECIFIED
    deadline = chosen.uniform(0.0, 0.3) if chosen.random() < 0.2 else None
    call = client.stream(prompt, new=1000, timeout=deadline, precision=own)
    if deadline is not None:
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await read(call)
        return
    for _ in range(chosen.randrange(7)):
        await call.read()
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


async def idle_model(client: Client) -> control_pb2.ModelStatus:
    """The state of the model once it has no request left, and the monitor has given back the blocks it scored."""

    async def idle() -> control_pb2.ModelStatus:
        while True:
            model = await client.model()
            if not model.running_requests + model.waiting_requests and model.kv_blocks_free == model.kv_blocks_total:
                return model

    return await asyncio.wait_for(idle(), IDLE_WITHIN_S)


# Wrong requests


LONG_NAME = "n" * 10_000
CONTEXT = 8_192
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
REFUSED = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

Generate = inference_pb2.GenerateRequest
Sampling = inference_pb2.Sampling
Switch = control_pb2.SwitchPrecisionRequest


def tokens(*ids: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=ids)


def chat(role: str, content: str) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role=role, content=content)])


def sampling(**options: Any) -> inference_pb2.GenerateRequest:
    return Generate(prompt="x", sampling=Sampling(**options))


def numbered(message: Message, **numbers: int) -> Message:
    """`message` with enum fields set to numbers that nobody knows; protobuf lets them through."""
    for name, number in numbers.items():
        setattr(message, name, number)
    return message


WRONG_FIELDS = {
    "input": Generate(),
    "prompt": Generate(prompt=""),
    "tokens": Generate(tokens=tokens()),
    "chat.messages": Generate(chat=inference_pb2.Chat()),
    "chat.messages[0].role": Generate(chat=chat("", "hello")),
    "tokens.ids: below": Generate(tokens=tokens(1, -1)),
    "tokens.ids: above": Generate(tokens=tokens(49_152)),
    "prompt: too long": Generate(prompt="word " * CONTEXT),
    "tokens: too long": Generate(tokens=tokens(*[5] * CONTEXT)),
    "chat: too long": Generate(chat=chat("user", "word " * CONTEXT)),
    "max_new_tokens: none": Generate(prompt="x", max_new_tokens=0),
    "max_new_tokens: negative": Generate(prompt="x", max_new_tokens=-1),
    "top_logprobs: negative": Generate(prompt="x", top_logprobs=-1),
    "top_logprobs: many": Generate(prompt="x", top_logprobs=21),
    "precision": numbered(Generate(prompt="x"), precision=99),
    "precision: negative": numbered(Generate(prompt="x"), precision=-1),
    "stop": Generate(prompt="x", stop=["a"] * 17),
    "stop[1]": Generate(prompt="x", stop=["a", ""]),
    "sampling.temperature: negative": sampling(temperature=-0.1),
    "sampling.temperature: no number": sampling(temperature=float("nan")),
    "sampling.temperature: infinite": sampling(temperature=float("inf")),
    "sampling.top_k": sampling(top_k=-1),
    "sampling.top_p: none": sampling(top_p=0),
    "sampling.top_p: more than all": sampling(top_p=1.5),
    "sampling.min_p": sampling(min_p=-1),
    "sampling.repetition_penalty": sampling(repetition_penalty=0),
    "mode": Switch(),
    "mode: unknown": numbered(Switch(), mode=99),
    "in_flight": numbered(Switch(mode=PRECISION_MODE_INT8), in_flight=7),
    "model": control_pb2.LoadModelRequest(),
    "limit": control_pb2.GetHistoryRequest(limit=-1),
}
"""The field that is wrong, and after a colon what is wrong with it."""

OTHER_WRONGS = (
    (NOT_FOUND, "no model 'gpt'; known: smollm2", Generate(model="gpt", prompt="x")),
    (NOT_FOUND, "no model 'nnn", Generate(model=LONG_NAME, prompt="x")),
    (NOT_FOUND, "no model 'gpt'", Switch(model="gpt", mode=PRECISION_MODE_INT8)),
    (NOT_FOUND, "no model 'gpt'", control_pb2.GetStatusRequest(model="gpt")),
    (NOT_FOUND, "no model 'gpt'", control_pb2.GetHistoryRequest(model="gpt")),
    (NOT_FOUND, "no model 'gpt'", control_pb2.WatchEventsRequest(model="gpt")),
    (NOT_FOUND, "no model 'gpt'", control_pb2.LoadModelRequest(model="gpt")),
    (NOT_FOUND, "no model 'gpt'", control_pb2.UnloadModelRequest(model="gpt")),
    (REFUSED, "is serving already", control_pb2.LoadModelRequest(model=MODEL)),
    (REFUSED, "does not allow to load a model from a path", control_pb2.LoadModelRequest(model="new", path="/etc")),
    (EXHAUSTED, "KV cache blocks", Generate(tokens=tokens(*[5] * 6_000), max_new_tokens=1)),
    (EXHAUSTED, "larger than max", Generate(prompt="x" * 20_000_000)),
)


@pytest.mark.parametrize("wrong", WRONG_FIELDS)
@asynchronous
async def test_the_field_that_is_wrong_is_named_and_the_daemon_serves_on(daemon: DaemonProcess, wrong: str) -> None:
    field, request = wrong.partition(":")[0], WRONG_FIELDS[wrong]
    async with connected(daemon) as client:
        code, message, details = await client.refusal(request)
        assert (code, message.partition(":")[0]) == (INVALID, field)
        assert [violation.field for detail in details for violation in detail.field_violations] == [field]
        assert (await client.answer(new=1)).last.finish_reason == LENGTH


@pytest.mark.parametrize(("code", "reason", "request_"), OTHER_WRONGS)
@asynchronous
async def test_what_cannot_be_done_is_refused_and_the_daemon_serves_on(
    daemon: DaemonProcess, code: grpc.StatusCode, reason: str, request_: Message
) -> None:
    async with connected(daemon) as client:
        found, message, _ = await client.refusal(request_)
        assert found is code
        assert reason in message
        assert (await client.answer(new=1)).last.finish_reason == LENGTH


@pytest.mark.parametrize("raw", [b"\x12\x02\xff\xfe", b"\x12\x7f", b"\xff" * 100], ids=["UTF-8", "cut", "noise"])
@asynchronous
async def test_what_is_no_request_is_refused_and_the_daemon_serves_on(daemon: DaemonProcess, raw: bytes) -> None:
    """A prompt that is not UTF-8, a field that ends early, and bytes that are no message at all."""
    async with connected(daemon) as client:
        method: Any = client.channel.unary_stream("/dskapi.v1.Inference/Generate")
        code, message, _ = await refusal(method(raw))
        assert (code, message.partition(":")[0]) == (INVALID, "request")
        assert (await client.answer(new=1)).last.finish_reason == LENGTH


@asynchronous
async def test_a_method_that_does_not_exist_is_refused(daemon: DaemonProcess) -> None:
    async with connected(daemon) as client:
        method: Any = client.channel.unary_unary("/dskapi.v1.Control/Explode")
        code, _, _ = await refusal(method(b""))
        assert code is grpc.StatusCode.UNIMPLEMENTED


@asynchronous
async def test_what_is_unusual_is_not_wrong(daemon: DaemonProcess, tokenizer: Tokenizer) -> None:
    """A role the chat template has not heard of, sampling at its limits, a stop string at the very start."""
    async with connected(daemon) as client:
        strange = [chat("oracle", "speak"), chat("user", ""), chat("user", "\u0000\U0001f600")]
        for conversation in strange:
            assert (await client.complete(Generate(chat=conversation, max_new_tokens=2))).last.usage.prompt_tokens > 0
        limits = Sampling(temperature=10, top_k=2**31 - 1, top_p=1e-6, min_p=1, repetition_penalty=10, seed=2**64 - 1)
        assert len((await client.answer(sampling=limits)).tokens) == 8
        whole = await client.answer(new=12)
        stopped = await client.answer(new=12, stop=[whole.text[:1]])
        assert (stopped.text, stopped.last.finish_reason) == ("", inference_pb2.FINISH_REASON_STOP)
        stopped = await client.answer(new=12, stop=["no such text", whole.text[9:14]])
        assert stopped.text == whole.text[: whole.text.index(whole.text[9:14])]
        assert stopped.ids == whole.ids[: len(stopped.ids)]
