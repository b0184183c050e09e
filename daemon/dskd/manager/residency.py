"""Which graphs of a model are in memory: built when asked for, shared where generations agree, released when unused."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog

from dskd import memory
from dskd.errors import FailedPreconditionError
from dskd.manager.events import EventBus
from dskd.manager.measuring import InTurn
from dskd.manager.parts import Build, BuildSlots, ModelBuilder, ModelLoop, Overtaking, ResidentGraph, ServedGeneration
from dskd.manager.proof import Proof
from dskd.manager.second_engine import SlotBuild
from dskd.priority import at_once
from dskquant.modes import LADDER, PrecisionMode

LONGEST_NAP_S = 5.0
"""Between two looks for graphs that nobody uses."""
SHORTEST_NAP_S = 0.05


class GraphId(NamedTuple):
    """What a graph computes: two generations that agree on it share the graph."""

    modes: frozenset[PrecisionMode]
    weights: str  # see `ModelBuilder.weights_of`

    @property
    def name(self) -> str:
        return "+".join(mode.value for mode in LADDER if mode in self.modes)


class Installation(NamedTuple):
    """A graph as the step loop has it: for one generation."""

    graph_id: GraphId
    generation: int


@dataclass(slots=True)
class Resident:
    """A graph in memory."""

    graph: ResidentGraph
    proofs: list[Proof]
    last_use: dict[int, float] = field(default_factory=dict)  # by generation it is installed for: `time.monotonic`
    slots: SlotBuild = field(default_factory=SlotBuild)  # the same on the second engine

    @property
    def nbytes(self) -> int:
        return self.graph.resident_bytes + self.slots.nbytes

    @property
    def worst_proofs(self) -> list[Proof]:
        """A mode is as noisy as on the noisier of its engines."""
        by_mode = {proof.mode: proof for proof in self.slots.proofs}
        pairs = ((proof, by_mode.get(proof.mode, proof)) for proof in self.proofs)
        return [max(pair, key=lambda proof: proof.divergence.mean_kl) for pair in pairs]

    def close(self) -> None:
        self.graph.close()
        self.slots.close()


@dataclass(slots=True)
class _UnderWay:
    task: asyncio.Task[Any]
    overtaking: Overtaking


@dataclass(frozen=True, slots=True)
class Retention:
    """How long graphs stay that nobody uses."""

    modes: Collection[PrecisionMode]  # of the serving generation: for ever
    on_demand_s: float  # the other modes of the serving generation
    previous_s: float  # other generations


class Residency:
    """The graphs of one model. Belongs to the asyncio thread; builds run in a thread of low priority."""

    def __init__(self, model: str, builder: ModelBuilder, events: EventBus) -> None:
        self._model = model
        self._builder = builder
        self._events = events
        self._log = structlog.get_logger().bind(model=model)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"build-{model}")
        self._residents: dict[GraphId, Resident] = {}
        self._builds: dict[Installation, _UnderWay] = {}
        self._followers: dict[GraphId, _UnderWay] = {}  # graphs of the second engine, of modes that serve already
        self._num_preparing = 0
        self._held: Counter[Installation] = Counter()
        # a graph that is on its way out must be gone before its successor can be installed
        self._changing: defaultdict[GraphId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._stirred = asyncio.Event()
        self._is_settling = False
        self._cache: Any = None  # before `attach` and after `close`
        self._in_turn: InTurn = at_once  # there is no loop before `attach`
        self._serving = 0  # number of the generation that serves
        self._wanted: Counter[PrecisionMode] = Counter()

    # Display

    def has(self, generation: ServedGeneration, mode: PrecisionMode) -> bool:
        """Whether `mode` of `generation` could serve at once."""
        resident = self._residents.get(self._id(generation, mode))
        return resident is not None and generation.number in resident.last_use

    def bytes_of(self, generation: ServedGeneration, mode: PrecisionMode) -> int:
        """Memory of the graph that serves `mode`; 0 if it is not in memory."""
        resident = self._residents.get(self._id(generation, mode))
        return resident.nbytes if resident else 0

    def graph_of(self, generation: ServedGeneration, mode: PrecisionMode) -> Any:
        """The graph that serves `mode`; None if it is not in memory."""
        resident = self._residents.get(self._id(generation, mode))
        return resident.graph if resident else None

    def slots_of(self, generation: ServedGeneration, mode: PrecisionMode) -> SlotBuild | None:
        """The graph of the second engine that decodes `mode`, or why there is none; None: the mode is not in memory."""
        resident = self._residents.get(self._id(generation, mode))
        return resident.slots if resident else None

    def holds_generation(self, number: int) -> bool:
        """Whether quantized graphs of that generation are in memory."""
        return any(graph_id.weights and number in resident.last_use for graph_id, resident in self._residents.items())

    def modes_in_memory(self, generation: ServedGeneration) -> frozenset[PrecisionMode]:
        """The modes of `generation` that could serve at once."""
        return frozenset(mode for mode in LADDER if self.has(generation, mode))

    def proofs(self, generation: ServedGeneration) -> dict[PrecisionMode, Proof]:
        """What its graphs in memory answered to the golden prompts."""
        found = [self._residents.get(self._id(generation, mode)) for mode in LADDER]
        return {proof.mode: proof for resident in found if resident for proof in resident.worst_proofs}

    def second_noise(self, generation: ServedGeneration, mode: PrecisionMode) -> float:
        """How many times noisier `mode` is on the noisier engine than on the first one, by their proofs; 1 or more."""
        resident = self._residents.get(self._id(generation, mode))
        kl = {proof.mode: proof.divergence.mean_kl for proof in (resident.proofs if resident else ())}
        if resident is None or not kl.get(mode):
            return 1.0
        return max(proof.divergence.mean_kl for proof in resident.worst_proofs if proof.mode is mode) / kl[mode]

    @property
    def in_preparation(self) -> list[str]:
        """Names of the graphs that are being built."""
        return [graph_id.name for graph_id, _ in self._builds]

    # Building

    async def build_first(self, generation: ServedGeneration, modes: Iterable[PrecisionMode]) -> None:
        """Builds the graphs of `modes` before there is a loop or a cache."""
        for graph_id in dict.fromkeys(self._id(generation, mode) for mode in modes):
            if graph_id not in self._residents:
                build = await self._build(generation, graph_id, Overtaking())
                last_use = {generation.number: time.monotonic()}
                self._residents[graph_id] = resident = Resident(build.graph, build.proofs, last_use)
                if build.build_slots:
                    resident.slots = await self._build_slots(build.build_slots, Overtaking())

    @property
    def any_graph(self) -> ResidentGraph:
        """One of the graphs in memory; they all take the same cache."""
        return next(iter(self._residents.values())).graph

    async def attach(self, loop: ModelLoop, cache: Any) -> None:
        """Gives `loop` the graphs built so far, bound to `cache` (anything but None), and those built later."""
        self._loop, self._cache = loop, cache
        self._in_turn = lambda work: loop.between_steps(work).result()
        for resident in self._residents.values():
            resident.graph.bind(cache)
            for number in resident.last_use:
                await asyncio.wrap_future(loop.install(number, resident.graph, resident.slots.graph))

    async def ensure(
        self, generation: ServedGeneration, mode: PrecisionMode, overtaking: Overtaking | None = None
    ) -> dict[str, float]:
        """Waits until `mode` of `generation` can serve.

        Returns the milliseconds of the phases it took; empty if it could already. A build goes on when the waiting is
        cancelled, and ends early when `overtaking` of whoever asked for it first tells so. Raises what `Builder.build`
        raises.
        """
        wanted = Installation(self._id(generation, mode), generation.number)
        while wanted in self._builds and self._builds[wanted].overtaking.happened():
            await asyncio.wait([self._builds[wanted].task])  # its graph must be gone before it is built anew
        resident = self._residents.get(wanted.graph_id)
        if resident is not None and generation.number in resident.last_use:
            resident.last_use[generation.number] = time.monotonic()
            return {}
        if wanted not in self._builds:
            overtaking = overtaking or Overtaking()
            task = asyncio.create_task(self._build_and_install(generation, wanted, overtaking))
            task.add_done_callback(_retrieve_error)
            self._builds[wanted] = _UnderWay(task, overtaking)
        return dict(await asyncio.shield(self._builds[wanted].task))

    @contextmanager
    def holding(self, generation: ServedGeneration, modes: Iterable[PrecisionMode]) -> Iterator[None]:
        """Keeps graphs from being released while somebody is about to use them."""
        keys = [Installation(self._id(generation, mode), generation.number) for mode in modes]
        for key in keys:
            self._held[key] += 1
        try:
            yield
        finally:
            for key in keys:
                self._held[key] -= 1
            self._stirred.set()

    # Releasing

    def want(self, mode: PrecisionMode) -> None:
        """Keeps `mode` of the serving generation, whichever that is, from being released."""
        self._wanted[mode] += 1

    def want_no_longer(self, mode: PrecisionMode) -> None:
        """Ends `want`."""
        self._wanted[mode] -= 1
        self._stirred.set()

    async def evict(self, generation: ServedGeneration, modes: frozenset[PrecisionMode]) -> None:
        """Closes quantized graphs at once, though requests use them: the loop is suspended until others take over."""
        for graph_id in {self._id(generation, mode) for mode in modes}:
            async with self._changing[graph_id]:
                resident = self._residents.pop(graph_id)
                self._overtake_follower(graph_id)
                for number in resident.last_use:
                    await asyncio.wrap_future(self._loop.suspend(number, graph_id.modes))
                await asyncio.to_thread(resident.close)
        memory.give_back()

    async def release_unused(self, retention: Retention) -> None:
        """Until `settle`, gives back the memory of graphs that nobody has used for as long as `retention` says."""
        while not self._is_settling:
            self._stirred.clear()
            naps = [nap for graph_id in list(self._residents) for nap in await self._look_at(graph_id, retention)]
            nap = min(max(min(naps, default=LONGEST_NAP_S), SHORTEST_NAP_S), LONGEST_NAP_S)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), nap)

    def serve(self, generation: ServedGeneration) -> None:
        """Tells that `generation` serves: the snapshot of the loop may lag behind. There may be graphs to release."""
        self._serving = generation.number
        self._stirred.set()

    async def settle(self) -> None:
        """Ends the releasing, and waits for the builds under way, whatever becomes of them."""
        self._is_settling = True
        self._stirred.set()
        for graph_id in list(self._followers):
            self._overtake_follower(graph_id)
        while under_way := [*self._builds.values(), *self._followers.values()]:
            await asyncio.wait([build.task for build in under_way])

    async def caught_up(self) -> None:
        """Waits until the second engine has what the first one has, as far as it can."""
        while self._followers:
            await asyncio.wait([follower.task for follower in self._followers.values()])

    def close(self) -> None:
        """Frees everything; blocks until a build under way has ended. The loop must have stopped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for resident in self._residents.values():
            resident.close()
        self._residents.clear()
        self._cache = None

    # How

    def _id(self, generation: ServedGeneration, mode: PrecisionMode) -> GraphId:
        modes = self._builder.graph_key(mode)
        return GraphId(modes, self._builder.weights_of(generation, modes))

    async def _build_and_install(
        self, generation: ServedGeneration, wanted: Installation, overtaking: Overtaking
    ) -> dict[str, float]:
        graph_id = wanted.graph_id
        phases: dict[str, float] = {}
        try:
            async with self._changing[graph_id]:
                resident = self._residents.get(graph_id)
                if resident is not None and generation.number in resident.last_use:
                    return phases  # it was on its way out, and stayed
                if resident is None:  # else another generation that agrees on it has it
                    self._publish("mode.preparing", f"preparing {graph_id.name}", wanted)
                    build = await self._build(generation, graph_id, overtaking)
                    resident, phases = Resident(build.graph, build.proofs), build.phases_ms
                    if build.build_slots:
                        self._start_following(graph_id, resident, build.build_slots)
                await asyncio.wrap_future(self._loop.install(generation.number, resident.graph, resident.slots.graph))
                resident.last_use[generation.number] = time.monotonic()
                self._residents[graph_id] = resident
        finally:
            del self._builds[wanted]
        self._publish("mode.resident", f"{graph_id.name} is resident", wanted, phases_ms=phases)
        return phases

    async def _build(self, generation: ServedGeneration, graph_id: GraphId, overtaking: Overtaking) -> Build:
        with self._preparing():
            build = await asyncio.get_running_loop().run_in_executor(
                self._thread,
                self._builder.build,
                generation,
                graph_id.modes,
                self._cache,
                overtaking,
                self._in_turn,
            )
        for proof in build.proofs:
            figures = proof.divergence
            self._log.info(
                "proven",
                generation=generation.number,
                mode=proof.mode.value,
                mean_kl=figures.mean_kl,
                agreement=figures.agreement,
            )
        return build

    def _start_following(self, graph_id: GraphId, resident: Resident, build_slots: BuildSlots) -> None:
        """Has the graph of the second engine made, while the first one serves alone."""
        if self._is_settling:
            return
        resident.slots = SlotBuild(reason="it is being prepared")
        overtaking = Overtaking()
        task = asyncio.create_task(self._follow(graph_id, resident, build_slots, overtaking))
        task.add_done_callback(_retrieve_error)
        self._followers[graph_id] = _UnderWay(task, overtaking)

    async def _follow(
        self, graph_id: GraphId, resident: Resident, build_slots: BuildSlots, overtaking: Overtaking
    ) -> None:
        try:
            slots = await self._build_slots(build_slots, overtaking)
            async with self._changing[graph_id]:
                if self._residents.get(graph_id) is not resident:
                    await asyncio.to_thread(slots.close)
                    return
                resident.slots = slots
                if slots.graph is not None:
                    for number in resident.last_use:
                        await asyncio.wrap_future(self._loop.install_slots(number, slots.graph))
        except Exception:
            self._log.exception("the second engine was not prepared", mode=graph_id.name)
            raise
        finally:
            follower = self._followers.get(graph_id)
            if follower and follower.overtaking is overtaking:  # else its modes have left and come back meanwhile
                del self._followers[graph_id]

    def _overtake_follower(self, graph_id: GraphId) -> None:
        if graph_id in self._followers:
            self._followers[graph_id].overtaking.overtake("the release of its modes")

    async def _build_slots(self, build_slots: BuildSlots, overtaking: Overtaking) -> SlotBuild:
        is_serving = self._cache is not None
        with self._preparing():
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, build_slots, is_serving, overtaking, self._in_turn
            )

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        if self._cache is None:  # nothing serves yet
            yield
            return
        self._num_preparing += 1
        self._loop.set_preparing(True)
        try:
            yield
        finally:
            self._num_preparing -= 1
            self._loop.set_preparing(self._num_preparing > 0)

    async def _look_at(self, graph_id: GraphId, retention: Retention) -> list[float]:
        """Releases what has been unused for long enough; the seconds until next looks."""
        naps = []
        resident = self._residents.get(graph_id)
        for number in list(resident.last_use) if resident else []:
            nap = self._nap(Installation(graph_id, number), retention)
            if nap <= 0:
                await self._release(Installation(graph_id, number))
            naps.append(nap)
        return naps

    def _nap(self, found: Installation, retention: Retention) -> float:
        """Seconds until an installation is to be looked at again; none are left for one that is to be released."""
        serves = found.generation == self._serving
        kept = {*retention.modes, *+self._wanted}
        if serves and not kept.isdisjoint(found.graph_id.modes):
            return LONGEST_NAP_S
        last_use, now = self._residents[found.graph_id].last_use, time.monotonic()
        kept_s = retention.on_demand_s if serves else retention.previous_s
        if self._is_used(found):
            last_use[found.generation] = now
            return max(kept_s / 4, SHORTEST_NAP_S)
        return last_use[found.generation] + kept_s - now

    def _is_used(self, found: Installation) -> bool:
        (modes, _), number = found
        now = self._loop.snapshot()
        serves = number == self._serving and now.mode in modes
        return serves or self._held[found] > 0 or any(now.requests_by_graph.get((number, mode)) for mode in modes)

    async def _release(self, found: Installation) -> None:
        graph_id, number = found
        async with self._changing[graph_id]:
            resident = self._residents.get(graph_id)
            if resident is None or self._is_used(found):
                return
            used = resident.last_use.pop(number)
            if not await self._retire(number, graph_id.modes):  # it has come into use since we looked
                resident.last_use[number] = used
                return
            if resident.last_use:
                return  # another generation has it too
            del self._residents[graph_id]
            self._overtake_follower(graph_id)
            await asyncio.to_thread(resident.close)
        memory.give_back()
        self._publish("mode.released", f"{graph_id.name} is released", found)
        self._log.info("released", mode=graph_id.name, generation=number)

    async def _retire(self, number: int, modes: frozenset[PrecisionMode]) -> bool:
        try:
            return await asyncio.wrap_future(self._loop.retire(number, modes))
        except FailedPreconditionError:  # it is active
            return False

    def _publish(self, kind: str, message: str, what: Installation, **fields: object) -> None:
        self._events.publish(kind, self._model, message, mode=what.graph_id.name, generation=what.generation, **fields)


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Who asked for the build is told its failure; asyncio need not warn when the asker has gone."""
    if not task.cancelled():
        task.exception()
