"""The noise monitor of a real daemon with a real model: what it does about noise, seen from outside, under load."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.changed_sets import changed_set, scaled
from tests.daemon_process import MODEL, Answer, Client, DaemonProcess, asynchronous, connected, daemon_process

from dskapi.v1 import control_pb2, inference_pb2
from dskapi.v1.common_pb2 import PRECISION_MODE_FP32, PRECISION_MODE_INT4, PrecisionMode
from dskquant.store import DEFAULT_PARAMETER_SET

STREAMS = 8
NEW = 64
LIMIT_S = 60.0
THRESHOLD = 2.5
"""Nats; between the noise of the default set in INT4 and that of the damaged one."""

REQUEST_THRESHOLD = 0.15
"""Nats; between the noise of answers that repeat their prompts and that of one in a language strange to INT4."""

LONG = 192
EASY_LINES = [f"{index} green bottles are hanging on the wall, and all of them are full" for index in range(2, 9)]
HARD_PROMPT = "Es war einmal ein kleines Mädchen, das in einem großen Wald wohnte und jeden Tag"
HARD_SAMPLING = inference_pb2.Sampling(temperature=1.2, seed=1)

MONITOR = {
    "reference": "fp32",
    "share": 0.25,
    "time_share": 0.5,
    "repair": "reprefill",
    "dwell_s": 1.0,
    "min_agreement": 0.0,
    "false_trip_samples": 1000.0,
}
ALL_PASS = {"max_kl": 1000.0, "min_agreement": 0.0, "max_worsening": 1e6}


@pytest.fixture(scope="module")
def damaged(smollm2_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default set with the scales of a layer changed."""
    default = smollm2_store / DEFAULT_PARAMETER_SET
    return changed_set(default, tmp_path_factory.mktemp("sets") / "damaged", scaled(".layers.5.", 3.0))


@pytest.fixture(scope="module")
def daemon(smollm2_store: Path) -> Iterator[DaemonProcess]:
    tables: dict[str, dict[str, Any]] = {
        MODEL: {"path": str(smollm2_store), "kv_cache_bytes": "64MiB", "resident": ["int4", "int8", "fp32"]},
        f"{MODEL}.proof": ALL_PASS,
        f"{MODEL}.monitor": MONITOR,
        f"{MODEL}.monitor.threshold": {"int4": THRESHOLD},
    }
    with daemon_process(tables) as process:
        yield process.start()
        assert process.stop() == 0


class Load:
    """Answers that follow each other in every stream."""

    def __init__(self, client: Client) -> None:
        self.answers: list[Answer] = []
        self._client = client
        self._stopped = False
        self.tasks = [asyncio.create_task(self._stream(index)) for index in range(STREAMS)]

    async def _stream(self, index: int) -> None:
        for turn in itertools.count():
            if self._stopped:
                return
            prompt = f"{index + turn} reasons to visit Paris in spring:"
            self.answers.append(await self._client.answer(prompt, NEW))

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self.tasks)


@asynccontextmanager
async def under_load(client: Client) -> AsyncIterator[Load]:
    """All answers have ended at its end; one that fails raises there."""
    load = Load(client)
    try:
        yield load
    finally:
        await load.stop()


async def apply(client: Client, config: str) -> control_pb2.ChangeResponse:
    response: control_pb2.ChangeResponse = await client.control.ApplyConfig(
        control_pb2.ApplyConfigRequest(config=f'model = "{MODEL}"\n{config}', wait=True)
    )
    return response


async def apply_set(client: Client, path: Path) -> int:
    """The generation that serves with the set at `path`."""
    generation: int = (await apply(client, f'[params]\nfile = "{path}"\n')).to_generation
    return generation


async def fallback_event(events: AsyncIterator[control_pb2.Event], words: str) -> control_pb2.Event:
    """The next decision of the monitor whose account has `words`."""

    async def found() -> control_pb2.Event:
        async for event in events:
            if event.kind.startswith("fallback") and words in event.message:
                return event
        pytest.fail("the daemon ended its events")

    return await asyncio.wait_for(found(), LIMIT_S)


async def noise(client: Client) -> control_pb2.GetNoiseResponse:
    response: control_pb2.GetNoiseResponse = await client.control.GetNoise(control_pb2.GetNoiseRequest(model=MODEL))
    return response


def makers(answer: Answer) -> list[tuple[int, PrecisionMode]]:
    """Generation and mode of the tokens, each run of equal ones once."""
    return [maker for maker, _ in itertools.groupby((token.generation, token.precision) for token in answer.tokens)]


@asynchronous
async def test_a_damaged_set_is_noticed_under_load_fp32_answers_and_a_good_set_is_trusted_again(
    daemon: DaemonProcess, smollm2_store: Path, damaged: Path
) -> None:
    async with connected(daemon) as client, client.watching() as events:
        first = await apply_set(client, smollm2_store / DEFAULT_PARAMETER_SET)
        async with under_load(client) as load:
            bad = await apply_set(client, damaged)
            tripped = await fallback_event(events, "-> tripped")
            state = await noise(client)
            after_trip = await client.answer(new=NEW)
            good = await apply_set(client, smollm2_store / DEFAULT_PARAMETER_SET)
            await fallback_event(events, "cooling -> healthy")
            at_last = await client.answer(new=NEW)
    assert tripped.kind == "fallback.committed"
    assert (state.generation, state.fallback) == (bad, PRECISION_MODE_FP32)
    assert makers(after_trip) == [(bad, PRECISION_MODE_FP32)]
    assert makers(at_last) == [(good, PRECISION_MODE_INT4)]
    order = [
        (first, PRECISION_MODE_INT4),
        (bad, PRECISION_MODE_INT4),
        (bad, PRECISION_MODE_FP32),
        (good, PRECISION_MODE_FP32),  # until the monitor has heard of the new generation
        (good, PRECISION_MODE_INT4),
    ]
    for answer in load.answers:
        assert len(answer.tokens) == NEW
        rest = iter(order)
        assert all(maker in rest for maker in makers(answer))
    seen = {maker for answer in load.answers for maker in makers(answer)}
    assert seen | {(good, PRECISION_MODE_FP32)} == set(order)


@asynchronous
async def test_of_eight_requests_only_the_one_that_is_hard_for_int4_is_escalated(
    daemon: DaemonProcess, smollm2_store: Path
) -> None:
    async with connected(daemon) as client, client.watching() as events:
        await apply_set(client, smollm2_store / DEFAULT_PARAMETER_SET)
        await apply(client, f'[monitor]\nscope = "request"\n[monitor.threshold]\nint4 = {REQUEST_THRESHOLD}\n')
        easy = [asyncio.create_task(client.answer(f"{line}\n" * 12, LONG)) for line in EASY_LINES]
        hard = asyncio.create_task(client.answer(HARD_PROMPT, LONG, sampling=HARD_SAMPLING))
        tripped = await fallback_event(events, "-> tripped")
        easy_answers = await asyncio.gather(*easy)
        hard_answer = await hard
    assert hard_answer.last.request_id in tripped.message
    assert [mode for _, mode in makers(hard_answer)] == [PRECISION_MODE_INT4, PRECISION_MODE_FP32]
    for answer in (*easy_answers, hard_answer):
        assert len(answer.tokens) == LONG
    assert {mode for answer in easy_answers for mode in answer.modes} == {PRECISION_MODE_INT4}
