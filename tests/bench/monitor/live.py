"""A model that serves as in the daemon, with every token and every score of its answers seen."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dskd.config import ModelConfig, ProofConfig, SchedulerConfig
from dskd.engine import sequence as engine
from dskd.engine.request import BlockScore, GenerationRequest, InFlight, MadeToken, Observation, SamplingParams
from dskd.engine.scheduler import Scheduler
from dskd.manager.events import EventBus
from dskd.manager.history import History
from dskd.manager.manager import QuantizerManager
from dskd.manager.types import Change, ChangeReport, HistoryEntry, SetReference
from dskd.monitor.config import MonitorConfig
from dskd.monitor.types import ModeNoise
from dskd.units import ByteSize
from dskquant.engines import load_engine
from dskquant.engines.protocol import Logits
from dskquant.modes import PrecisionMode

STREAMS = 8
ALL_PASS = ProofConfig(max_kl=100.0, min_agreement=0.0, max_worsening=1e9)
LOOK_S = 0.02


class SeenToken(NamedTuple):
    """A token that an answer was given."""

    request_id: str
    position: int  # of the token that was read
    mode: PrecisionMode
    generation: int
    began: float  # seconds of `time.monotonic`, before the scorer took note of it
    ended: float
    logits: Logits | None  # that it was drawn from, where asked for


@dataclass
class Answer:
    """One request, as its client sees it."""

    request: GenerationRequest
    tokens: list[MadeToken] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)  # seconds of `time.monotonic`
    error: Exception | None = None

    @property
    def text(self) -> list[int]:
        """Prompt and answer."""
        return [*self.request.prompt, *(token.id for token in self.tokens)]


class SeenManager(QuantizerManager):
    """Keeps what its step loop measures."""

    scores: list[BlockScore]

    def _observe(self, observations: list[Observation]) -> None:
        self.scores += [seen for seen in observations if isinstance(seen, BlockScore)]
        super()._observe(observations)


class Live:
    """A manager, and what was seen of it."""

    def __init__(self, manager: SeenManager, history: History, keep_logits: Callable[[engine.Sequence], bool]) -> None:
        self.manager = manager
        self.seen: list[SeenToken] = []
        self._history = history
        self._keep_logits = keep_logits
        scorer = manager._loop._core._scorer
        self._record = scorer.record
        scorer.record = self._see  # type: ignore[method-assign]

    def _see(self, sequence: engine.Sequence, row: Logits, scheduler: Scheduler) -> None:
        began = time.monotonic()
        self._record(sequence, row, scheduler)
        ended = time.monotonic()
        kept = row.copy() if self._keep_logits(sequence) else None
        name, position = sequence.request.request_id, len(sequence.tokens) - 2
        self.seen.append(SeenToken(name, position, sequence.mode, sequence.generation, began, ended, kept))

    @property
    def scores(self) -> list[BlockScore]:
        return self.manager.scores

    def samples(self, mode: PrecisionMode) -> int:
        """Tokens of `mode` that were scored."""
        return sum(len(score.kl) for score in self.scores if score.mode is mode)

    def noise(self, mode: PrecisionMode) -> ModeNoise:
        return next(noise for noise in self.manager.noise(0).modes if noise.mode is mode)

    def entries(self, kind: str) -> list[HistoryEntry]:
        """Of the history, oldest first."""
        return [entry for entry in reversed(self._history.newest(None, 10_000)) if entry.kind == kind]

    async def apply(self, parameters: Path) -> ChangeReport:
        """Serves with the set at `parameters`."""
        change = Change(parameters=SetReference(parameters))
        return await self.manager.apply(change, "bench", dry_run=False, wait=True)

    async def set_monitor(self, **keys: object) -> None:
        """Overrides keys of the monitor's configuration."""
        await self.manager.apply(Change(monitor=keys), "bench", dry_run=False, wait=True)

    async def switch(self, mode: PrecisionMode) -> None:
        await self.manager.switch(mode, InFlight.MIGRATE, "bench", wait=True)

    async def answer(self, request: GenerationRequest) -> Answer:
        """The whole answer; a failure is kept in it."""
        answer = Answer(request)
        try:
            async for output in self.manager.generate(request):
                answer.tokens += output.tokens
                answer.arrived += [time.monotonic()] * len(output.tokens)
        except Exception as error:
            answer.error = error
        return answer

    async def settled(self, mode: PrecisionMode) -> None:
        """Waits until all that was recorded is scored, and the monitor knows it."""
        scorer = self.manager._loop._core._scorer
        while scorer.has_jobs or scorer._beside is not None or self.noise(mode).total_samples < self.samples(mode):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)  # a benchmark must not add events to the loop it measures


@asynccontextmanager
async def live(
    store: Path,
    monitor: MonitorConfig,
    *,
    resident: Sequence[PrecisionMode],
    parameters: Path | None = None,
    kv_cache_bytes: int = 512 << 20,
    keep_logits: Callable[[engine.Sequence], bool] = lambda _: False,
) -> AsyncIterator[Live]:
    """A model that serves in the first of `resident` with `parameters` (None: the default set of `store`)."""
    config = ModelConfig(
        path=store,
        resident=tuple(resident),
        default_mode=resident[0],
        kv_cache_bytes=ByteSize(kv_cache_bytes),
        on_demand_ttl_s=0.0,
        proof=ALL_PASS,
    )
    with tempfile.TemporaryDirectory() as state:
        history = History()
        manager = SeenManager(
            "bench",
            config,
            SchedulerConfig(),
            load_engine("openvino"),
            Path(state),
            EventBus(),
            history,
            monitor,
        )
        manager.scores = []
        await manager.start()
        try:
            seen = Live(manager, history, keep_logits)
            if parameters is not None:
                await seen.apply(parameters)
            yield seen
        finally:
            await manager.close(0)


class Streams:
    """Keeps requests open, one after the other in each stream, until it is stopped."""

    def __init__(self, bench: Live, prompts: Iterator[tuple[int, ...]], new: int, count: int = STREAMS) -> None:
        self.answers: list[Answer] = []  # those that have ended
        self._bench = bench
        self._prompts = prompts
        self._new = new
        self._stopped = False
        self._tasks = [asyncio.create_task(self._stream(index)) for index in range(count)]

    async def stop(self) -> list[Answer]:
        """Lets the open requests end; all answers."""
        self._stopped = True
        await asyncio.gather(*self._tasks)
        return self.answers

    async def _stream(self, index: int) -> None:
        for turn in itertools.count():
            if self._stopped:
                return
            request = sampled_request(f"s{index}-{turn}", next(self._prompts), self._new, seed=index + 1000 * turn)
            self.answers.append(await self._bench.answer(request))

    async def until(self, is_so: Callable[[], bool], what: str, limit_s: float) -> None:
        """Waits until `is_so`. Raises RuntimeError when `what` it means takes longer than `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > end:
                raise RuntimeError(f"waited {limit_s:g} s for {what}")
            await asyncio.sleep(LOOK_S)


def sampled_request(name: str, prompt: tuple[int, ...], new: int, seed: int = 0) -> GenerationRequest:
    """Drawn at a temperature at which a small model does not get into loops."""
    return GenerationRequest(name, prompt, new, SamplingParams(temperature=0.8, seed=seed))
