"""A real model in a real daemon: precision switched under load, answers cancelled, wrong requests refused."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from golden_models import GOLDEN
from tests.daemon_process import MODEL, Answer, Client, DaemonProcess, asynchronous, connected, daemon_process
from tokenizers import Tokenizer

from dskapi.v1 import control_pb2, inference_pb2
from dskapi.v1.common_pb2 import (
    IN_FLIGHT_FINISH,
    PRECISION_MODE_FP16,
    PRECISION_MODE_FP32,
    PRECISION_MODE_INT4,
    PRECISION_MODE_INT8,
)

MODES = (PRECISION_MODE_INT4, PRECISION_MODE_INT8, PRECISION_MODE_FP16, PRECISION_MODE_FP32)
STREAMS = 8
SWITCHES = 200
LENGTH = inference_pb2.FINISH_REASON_LENGTH
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
        "kv_cache_bytes": "256MiB",
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

    modes: list[int]  # the one before the first switch, and then one for each
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

    async def all_answers(client: Client) -> list[Answer]:
        modes = itertools.cycle(MODES)
        streams = (client.answer(prompt, 40, precision=mode, top_logprobs=2) for prompt, mode in zip(PROMPTS, modes))
        return await asyncio.gather(*streams)

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
        for mode, before, after in zip(itertools.cycle(MODES), quiet, switched):
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
    answer = Answer()
    async with connected(daemon) as client:
        async for response in client.inference.Generate(request):
            answer.add(response)
    assert answer.ids == golden[f"answer{chat}"].tolist()
