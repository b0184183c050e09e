"""Which graphs of a generation are in memory: built when asked for, released when long unused."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog

from dskd import memory
from dskd.engine.step_loop import StepLoop
from dskd.errors import FailedPreconditionError
from dskd.manager.build import Build, Builder
from dskd.manager.events import EventBus
from dskquant.engines.protocol import Graph, KVCache
from dskquant.modes import LADDER, PrecisionMode

GraphKey = frozenset[PrecisionMode]
"""The modes that one graph serves."""

LONGEST_NAP_S = 5.0
"""Between two looks for graphs that nobody uses."""


@dataclass(slots=True)
class Resident:
    """A graph in memory, and when it was last asked for (seconds of `time.monotonic`)."""

    graph: Graph
    asked: float


class Residency:
    """The graphs of one generation. Belongs to the asyncio thread; builds run in a thread of low priority."""

    def __init__(self, model: str, builder: Builder, generation: int, events: EventBus) -> None:
        self._model = model
        self._builder = builder
        self._generation = generation
        self._events = events
        self._log = structlog.get_logger().bind(model=model, generation=generation)
        self._key = builder.options.graph_key
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"build-{model}")
        self._residents: dict[GraphKey, Resident] = {}
        self._builds: dict[GraphKey, asyncio.Task[Build]] = {}
        self._held: Counter[GraphKey] = Counter()
        # a graph that is on its way out must be gone before its successor can be installed
        self._changing: defaultdict[GraphKey, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._settling = asyncio.Event()

    def has(self, mode: PrecisionMode) -> bool:
        """Whether `mode` could serve at once."""
        return self._key(mode) in self._residents

    def bytes_of(self, mode: PrecisionMode) -> int:
        """Memory of the graph that serves `mode`; 0 if it is not in memory."""
        resident = self._residents.get(self._key(mode))
        return resident.graph.resident_bytes if resident else 0

    @property
    def in_preparation(self) -> list[str]:
        """Names of the graphs that are being built."""
        return [_name(key) for key in self._builds]

    async def build_first(self, modes: Collection[PrecisionMode]) -> Graph:
        """Builds the graphs of `modes` before there is a loop or a cache; returns one of them."""
        for key in dict.fromkeys(self._key(mode) for mode in modes):
            build = await self._build(key, None)
            self._residents[key] = Resident(build.graph, time.monotonic())
        return next(iter(self._residents.values())).graph

    async def attach(self, loop: StepLoop, cache: KVCache) -> None:
        """Gives `loop` the graphs built so far, bound to `cache`, and those built later."""
        self._loop, self._cache = loop, cache
        for resident in self._residents.values():
            resident.graph.bind(cache)
            await asyncio.wrap_future(loop.install(self._generation, resident.graph))

    async def ensure(self, mode: PrecisionMode) -> dict[str, float]:
        """Waits until `mode` can serve. Returns the milliseconds of the phases it took; empty if it could already.

        A build goes on when the waiting is cancelled. Raises what `Builder.build` raises.
        """
        key = self._key(mode)
        if key in self._residents:
            self._residents[key].asked = time.monotonic()
            return {}
        if key not in self._builds:
            self._builds[key] = asyncio.create_task(self._build_and_install(key))
            self._builds[key].add_done_callback(_retrieve_error)
        build = await asyncio.shield(self._builds[key])
        return dict(build.phases_ms)

    @contextmanager
    def holding(self, mode: PrecisionMode) -> Iterator[None]:
        """Keeps the graph of `mode` from being released while somebody is about to use it."""
        self._held[self._key(mode)] += 1
        try:
            yield
        finally:
            self._held[self._key(mode)] -= 1

    async def release_unused(self, kept: Collection[PrecisionMode], ttl_s: float) -> None:
        """Until `settle`, gives back the memory of graphs, other than those of `kept`, unused for `ttl_s` seconds."""
        kept_keys = {self._key(mode) for mode in kept}
        while not await self._settles_within(min(max(ttl_s / 4, 0.05), LONGEST_NAP_S)):
            for key in self._residents.keys() - kept_keys:
                if self._is_used(key):
                    self._residents[key].asked = time.monotonic()
                elif time.monotonic() - self._residents[key].asked >= ttl_s:
                    await self._release(key)

    async def settle(self) -> None:
        """Ends the releasing, and waits for the builds under way, whatever becomes of them."""
        self._settling.set()
        while self._builds:
            await asyncio.wait(self._builds.values())

    def close(self) -> None:
        """Frees everything; blocks until a build under way has ended. The loop must have stopped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for resident in self._residents.values():
            resident.graph.close()
        self._residents.clear()

    async def _settles_within(self, seconds: float) -> bool:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settling.wait(), seconds)
        return self._settling.is_set()

    async def _build_and_install(self, key: GraphKey) -> Build:
        name = _name(key)
        self._events.publish("mode.preparing", self._model, f"preparing {name}", mode=name)
        try:
            async with self._changing[key]:
                build = await self._build(key, self._cache)
                await asyncio.wrap_future(self._loop.install(self._generation, build.graph))
        finally:
            del self._builds[key]
        self._residents[key] = Resident(build.graph, time.monotonic())
        self._events.publish("mode.resident", self._model, f"{name} is resident", mode=name, phases_ms=build.phases_ms)
        return build

    async def _build(self, key: GraphKey, cache: KVCache | None) -> Build:
        build = await asyncio.get_running_loop().run_in_executor(self._thread, self._builder.build, key, cache)
        for proof in build.proofs:
            figures = proof.divergence
            self._log.info("proven", mode=proof.mode.value, mean_kl=figures.mean_kl, agreement=figures.agreement)
        return build

    def _is_used(self, key: GraphKey) -> bool:
        now = self._loop.snapshot()
        return now.mode in key or self._held[key] > 0 or any(now.requests_by_mode.get(mode) for mode in key)

    async def _release(self, key: GraphKey) -> None:
        async with self._changing[key]:
            resident = self._residents.pop(key)
            try:
                await asyncio.wrap_future(self._loop.retire(self._generation, resident.graph.modes))
            except FailedPreconditionError:  # it has become the active one since we looked
                self._residents[key] = resident
                return
            await asyncio.to_thread(resident.graph.close)
        memory.give_back()
        self._events.publish("mode.released", self._model, f"{_name(key)} is released", mode=_name(key))
        self._log.info("released", mode=_name(key))


def _retrieve_error(task: asyncio.Task[Build]) -> None:
    """Who asked for the build is told its failure; asyncio need not warn when the asker has gone."""
    if not task.cancelled():
        task.exception()


def _name(key: GraphKey) -> str:
    return "+".join(mode.value for mode in LADDER if mode in key)
