"""The state of a step loop and all that changes it: requests, the active mode, the graphs. One thread at a time."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import structlog

from dskd.engine.batching import build_batch
from dskd.engine.block_pool import BlockPool
from dskd.engine.exploration import Explorer
from dskd.engine.graph_table import GraphTable
from dskd.engine.pace import EscalationPace
from dskd.engine.request import (
    FinishReason,
    FlipReport,
    GenerationRequest,
    HealthSample,
    InFlight,
    LoopSnapshot,
    MadeToken,
    ModeRules,
    NonFinite,
    Observation,
    RequestStats,
    ScoringPlan,
    StepOutput,
)
from dskd.engine.sampler import Draw, NonFiniteLogitsError, draw_tokens
from dskd.engine.scheduler import Scheduler
from dskd.engine.sequence import Chunk, Sequence
from dskd.engine.shadow import ShadowScorer
from dskd.engine.slot_decoder import SlotDecoder
from dskd.errors import FailedPreconditionError, InternalError, InvalidArgumentError, UnavailableError
from dskd.monitor.health import HealthProbe
from dskd.monitor.rules import Situation, effective_mode, is_above
from dskquant.engines.protocol import Graph, Logits, SlotGraph
from dskquant.modes import LADDER, PrecisionMode


class StepCore:
    """Runs open requests step by step. `settle` is owed after every change and after every step.

    Errors raised here are DskdErrors: the refusal of what was asked for.
    """

    def __init__(
        self,
        *,
        model: str,
        engine_name: str,
        scheduler: Scheduler,
        mode: PrecisionMode,
        generation: int,
        deliver: Callable[[list[StepOutput]], None],
        observe: Callable[[list[Observation]], None],
        ask: Callable[[Callable[[], None]], object],
        slots: SlotDecoder | None = None,
    ) -> None:
        """`ask` makes whoever drives the core call something between two steps; `slots` may run steps of decodes."""
        self.log = structlog.get_logger().bind(model=model, engine=engine_name)
        self._engine_name = engine_name
        self._slots = slots
        self._use(scheduler)
        self._mode = mode
        self._generation = generation
        self._deliver = deliver
        self._observe = observe
        self._graphs = GraphTable()
        self._scorer = ShadowScorer(self._graphs, observe, ask)
        self._explorer = Explorer(slots, self._graphs, self._scorer.alone_with) if slots else None
        self._health: HealthProbe | None = None  # made when the size of the vocabulary is known
        self._rules = ModeRules()
        self._pace = EscalationPace()
        self._modes_are_stale = False  # a flip is quick: what the rules make of it is found out with the next step
        self._last_step = time.perf_counter()
        self._open: dict[str, Sequence] = {}
        self._outputs: list[StepOutput] = []
        self._drains: list[Future[int]] = []
        self._drain_deadline = math.inf
        self._aborted = 0
        self._is_suspended = False
        self._steps = 0
        self._tokens_by_mode = dict.fromkeys(PrecisionMode, 0)
        self._tokens_by_engine: Counter[str] = Counter()
        self.snapshot = self._take_snapshot()

    @property
    def is_idle(self) -> bool:
        return not self._scheduler.has_sequences

    @property
    def has_work(self) -> bool:
        return not self._is_suspended and (not self.is_idle or self._scorer.has_jobs)

    def check(self) -> None:
        """Raises InternalError if blocks were lost or are used twice."""
        self._scheduler.check()

    # What may be asked for

    def submit(self, request: GenerationRequest, arrived: float) -> None:
        """Opens `request`, which came in at `arrived` (seconds of `time.perf_counter`)."""
        if self._drain_deadline < math.inf:
            raise UnavailableError("the model is being unloaded")
        if request.request_id in self._open:
            raise InvalidArgumentError("request_id", f"{request.request_id!r} is open already")
        mode = request.precision or self._mode
        if not self._is_suspended:  # else the graph is on its way
            self._graphs.require((self._generation, mode))
        sequence = Sequence(request, mode, self._generation, arrived)
        sequence.mode = self._mode_of(sequence)
        self._scheduler.add(sequence)
        self._open[request.request_id] = sequence

    def cancel(self, request_id: str) -> bool:
        """Ends a request; False if it is not open."""
        sequence = self._open.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, finish=FinishReason.CANCELLED)
        return True

    def install(self, generation: int, graph: Graph, slot_graph: SlotGraph | None = None) -> None:
        """Makes `graph` available for its modes, and `slot_graph`, if there is one, for their decodes."""
        self._graphs.install(generation, graph)
        if slot_graph:
            self.install_slots(generation, slot_graph)

    def install_slots(self, generation: int, slot_graph: SlotGraph) -> None:
        """Lets `slot_graph` decode for the installed graph of its modes."""
        if self._slots:
            self._slots.install(generation, slot_graph)

    def flip(self, mode: PrecisionMode, generation: int, in_flight: InFlight) -> FlipReport:
        """Makes `mode` of `generation` the active one."""
        began = time.perf_counter_ns()
        self._graphs.require((generation, mode))
        from_mode = self._mode
        self._mode, self._generation = mode, generation
        migrated = self._migrate() if in_flight is InFlight.MIGRATE else 0
        microseconds = (time.perf_counter_ns() - began) / 1000
        return FlipReport(from_mode, mode, generation, microseconds, migrated)

    def retire(self, generation: int, modes: frozenset[PrecisionMode]) -> bool:
        """Forgets these graphs unless an open request uses one of them; whether it did."""
        if generation == self._generation and self._mode in modes:
            raise FailedPreconditionError(self._mode.value, f"{self._mode.value} of generation {generation} is active")
        if self._scorer.uses(generation, modes):
            return False
        if any(
            sequence.generation == generation and not modes.isdisjoint({sequence.mode, sequence.base_mode})
            for sequence in self._scheduler.sequences
        ):
            return False
        self._drop(generation, modes)
        return True

    def suspend(self, generation: int, modes: frozenset[PrecisionMode]) -> None:
        """Holds all steps until `resume`, and forgets these graphs though they may be in use."""
        self._drop(generation, modes)
        self._is_suspended = True

    def resume(self) -> None:
        """Goes on with the steps; requests whose graph has not come back end with UnavailableError."""
        self._is_suspended = False
        for sequence in list(self._scheduler.sequences):
            if sequence.served_by not in self._graphs:
                reason = f"{sequence.mode.value} of generation {sequence.generation} is gone"
                self._end(sequence, error=UnavailableError(reason))

    def set_rules(self, rules: ModeRules, repair: bool) -> None:
        """Chooses modes by `rules` from the next step on; `repair`: sequences whose mode rises are read anew."""
        self._rules = rules
        for sequence in list(self._scheduler.sequences):
            self._move(sequence, repair)

    def escalate(self, request_id: str, mode: PrecisionMode, repair: bool) -> bool:
        """Serves one request in at least `mode` to its end; False if it is not open, or chose its precision itself."""
        sequence = self._open.get(request_id)
        if sequence is None or sequence.request.precision is not None:
            return False
        sequence.fallback = mode
        self._move(sequence, repair)
        return True

    def set_scoring(self, plan: ScoringPlan | None) -> None:
        """Measures by `plan` from now on."""
        self._scorer.set_plan(plan, self._scheduler)

    def set_preparing(self, is_preparing: bool) -> None:
        """Whether a graph is being built meanwhile."""
        self._scorer.is_thrifty = is_preparing

    def drain(self, grace_s: float, done: Future[int]) -> None:
        """Refuses new requests; `done` resolves, with the number of those aborted, when none is open any more."""
        self._drain_deadline = min(self._drain_deadline, time.perf_counter() + grace_s)
        self._drains.append(done)

    # Steps

    def step(self) -> None:
        """Runs one step of every graph that has work. Raises InternalError, rather than spin, if nothing can run."""
        self._make_room()
        if self._rules.vary or self._modes_are_stale:
            for sequence in self._scheduler.sequences:
                sequence.mode = self._mode_of(sequence)
            self._modes_are_stale = False
        held = self._pace.held(self._scheduler.running, self._rules.config.escalation_share)
        chunks = self._scheduler.schedule(held) or self._scheduler.schedule()
        if not chunks:
            raise InternalError("requests are open, but none of them can run")
        now = time.perf_counter()
        by_graph: dict[int, tuple[Graph, list[Chunk]]] = {}
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.started is None:
                sequence.started = now
            graph = self._graphs[sequence.served_by]
            by_graph.setdefault(id(graph), (graph, []))[1].append(chunk)
        num_decodes = sum(chunk.is_decode for chunk in chunks) if self._slots else 0
        for graph, its_chunks in by_graph.values():
            self._run(graph, self._run_in_slots(self._slots, its_chunks, num_decodes) if self._slots else its_chunks)
        self._pace.note(chunks, time.perf_counter() - now)
        self._steps += 1

    def score(self) -> None:
        """Spends what time may be spent on measuring; outputs have been told by now."""
        now = time.perf_counter()
        if not self.is_idle:
            self._scorer.earn(now - self._last_step)
        self._last_step = now
        self._scorer.run_next(self._scheduler, self.is_idle)

    def explore(self) -> None:
        """May time a step that nobody asked for, now that no request is open."""
        if self._explorer and self.is_idle:
            try:
                self._explorer.explore(self._scheduler.pool)
            except Exception:
                self.log.exception("a step could not be timed")

    def close(self) -> None:
        """Ends its threads and lets go of the graphs."""
        self._scorer.close()
        self._graphs.clear()
        if self._slots:
            self._slots.close()

    def settle(self) -> None:
        """What follows a change or a step: outputs are told, what is no longer used is let go."""
        if time.perf_counter() >= self._drain_deadline:
            self._abort_all()
        self._tell()
        self.snapshot = self._take_snapshot()
        if self._drains and self.is_idle:
            drained, self._drains = self._drains, []
            for done in drained:
                done.set_result(self._aborted)

    def abandon(self, reason: Exception) -> None:
        """Ends every request with `reason`. The scheduler is not asked: a bug may have damaged it."""
        self._aborted += len(self._open)
        self._outputs += [StepOutput(request_id, error=reason) for request_id in self._open]
        self._open.clear()
        pool = self._scheduler.pool
        self._use(Scheduler(self._scheduler.config, BlockPool(pool.num_blocks, pool.block_size)))
        if self._slots:
            self._slots.vacate()
        self._scorer.abandon()
        self.settle()

    def _run(self, graph: Graph, chunks: list[Chunk]) -> None:
        if not chunks:
            return
        with self._scorer.alone_with(graph):
            try:
                if self._slots:
                    self._slots.leave(chunk.sequence for chunk in chunks)
                batch = build_batch(chunks, self._scheduler.pool.block_size)
                began = time.perf_counter()
                logits = graph.run(batch)
                if self._slots:
                    self._slots.learn_paged(chunks, time.perf_counter() - began)
            except Exception:
                self._fail([chunk.sequence for chunk in chunks])
                return
            self._draw(logits, chunks, self._engine_name)

    def _run_in_slots(self, slots: SlotDecoder, chunks: list[Chunk], num_decodes: int) -> list[Chunk]:
        """Runs those of `chunks`, which one graph serves, that are decoded in slots; the others.

        `num_decodes`: of the whole step.
        """
        decodes = [chunk for chunk in chunks if chunk.is_decode]
        graph = slots.graph_for(decodes, num_decodes) if decodes else None
        if graph is None:
            return chunks
        others = [chunk for chunk in chunks if not chunk.is_decode]
        try:
            logits = slots.run(graph, decodes)
        except Exception:
            sequence = decodes[0].sequence
            self.log.exception("decoding in slots failed and is given up", generation=sequence.generation)
            slots.drop(sequence.generation, graph.modes)
            return chunks
        self._draw(logits, decodes, slots.engine_name)
        return others

    def _draw(self, logits: Logits, chunks: list[Chunk], engine: str) -> None:
        """Makes tokens of the logits [n, vocabulary] of those of `chunks` that have them; `engine` has run them all."""
        ready = [chunk.sequence for chunk in chunks if chunk.wants_logits]
        try:
            draws = draw_tokens(logits, [sequence.sampler for sequence in ready]) if ready else []
        except Exception:
            self._fail([chunk.sequence for chunk in chunks])
            return
        for chunk in chunks:
            self._scheduler.postprocess(chunk)
        if ready:
            self._look_at_health(logits, ready)
        for sequence, draw, row in zip(ready, draws, logits, strict=True):
            if isinstance(draw, NonFiniteLogitsError):
                self._refuse_logits(sequence)
            else:
                self._accept(sequence, draw, row, engine)

    def _look_at_health(self, logits: Logits, ready: list[Sequence]) -> None:
        if self._health is None:
            self._health = HealthProbe(logits.shape[1])
        samples: list[Observation] = []
        for row, health in self._health.step(logits):
            if health.finite:  # the others are told when they are refused
                sequence = ready[row]
                samples.append(
                    HealthSample(
                        sequence.request.request_id,
                        sequence.generation,
                        sequence.mode,
                        health.entropy,
                        health.margin,
                        sequence.repetition.unique_ratio,
                    )
                )
        if samples:
            self._observe(samples)

    def _accept(self, sequence: Sequence, draw: Draw, row: Logits, engine: str) -> None:
        mode = sequence.mode
        token = MadeToken(draw.id, mode, sequence.generation, engine, draw.logprob, draw.top_logprobs)
        sequence.tokens.append(draw.id)
        sequence.repetition.push(draw.id)
        self._scorer.record(sequence, row, self._scheduler)
        if sequence.first_token is None:
            sequence.first_token = time.perf_counter()
        self._tokens_by_mode[mode] += 1
        self._tokens_by_engine[engine] += 1
        finish = sequence.finish_reason
        if finish is None:
            stats = stats_of(sequence, time.perf_counter())
            self._outputs.append(StepOutput(sequence.request.request_id, (token,), stats=stats))
        else:
            self._end(sequence, finish=finish, tokens=(token,))

    def _refuse_logits(self, sequence: Sequence) -> None:
        """Reads the whole sequence again in the most exact mode at hand: its cache may hold what is not finite, too."""
        mode, request_id, generation = sequence.mode, sequence.request.request_id, sequence.generation
        higher = [other for other in LADDER if is_above(other, mode) and (generation, other) in self._graphs]
        redone_in = higher[-1] if higher else None
        self.log.error(
            "non-finite logits",
            generation=generation,
            mode=mode.value,
            request=request_id,
            redone_in=redone_in.value if redone_in else None,
        )
        self._observe([NonFinite(request_id, generation, mode, redone_in)])
        if redone_in is None:
            self._end(sequence, error=InternalError(f"mode {mode.value} produced non-finite logits"))
            return
        sequence.fallback = sequence.mode = redone_in
        self._restart(sequence)

    def _fail(self, sequences: list[Sequence]) -> None:
        """Ends the requests of a batch that raised; the exception is the one being handled."""
        generations = sorted({sequence.generation for sequence in sequences})
        requests = [sequence.request.request_id for sequence in sequences]
        self.log.exception("step failed", generations=generations, requests=requests)
        for sequence in sequences:
            self._end(sequence, error=InternalError(f"a step in mode {sequence.mode.value} failed; the log tells more"))

    def _migrate(self) -> int:
        """Moves the open requests to the active mode and generation; the number of those whose mode changed."""
        migrated = 0
        offered = {mode for mode in PrecisionMode if (self._generation, mode) in self._graphs}
        for sequence in self._scheduler.sequences:
            if sequence.request.precision is None:
                migrated += sequence.base_mode is not self._mode
                sequence.base_mode = sequence.mode = self._mode
            if sequence.base_mode in offered:
                sequence.generation = self._generation
            self._modes_are_stale |= sequence.fallback is not None
        self._modes_are_stale |= self._rules.bend
        return migrated

    def _drop(self, generation: int, modes: frozenset[PrecisionMode]) -> None:
        self._graphs.drop(generation, modes)
        if self._slots:
            self._slots.drop(generation, modes)

    def _use(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        if self._slots:
            scheduler.on_release = self._slots.forget

    # Modes

    def _mode_of(self, sequence: Sequence) -> PrecisionMode:
        """The mode of the next step of `sequence`; its base mode where the one wanted is not in memory."""
        rules = self._rules
        if not rules.bend and sequence.fallback is None:
            return sequence.base_mode
        situation = Situation(
            sequence.base_mode,
            sequence.phase,
            len(sequence.tokens),
            sequence.request.precision,
            rules.pin,
            rules.fallback,
            rules.lowered,
        )
        wanted = effective_mode(situation, rules.config).mode
        if sequence.fallback is not None and is_above(sequence.fallback, wanted):
            wanted = sequence.fallback
        return wanted if (sequence.generation, wanted) in self._graphs else sequence.base_mode

    def _move(self, sequence: Sequence, repair: bool) -> None:
        before, sequence.mode = sequence.mode, self._mode_of(sequence)
        if repair and is_above(sequence.mode, before) and sequence.num_cached:
            self._restart(sequence)

    def _restart(self, sequence: Sequence) -> None:
        self._scorer.forget(sequence)
        self._scheduler.restart(sequence)

    def _make_room(self) -> None:
        """Requests come before measurements: blocks that are lent are taken back when blocks are short."""
        if self._scheduler.waiting or self._scheduler.pool.num_free < len(self._scheduler.running):
            self._scorer.drop_jobs(self._scheduler)

    # Ends

    def _end(
        self,
        sequence: Sequence,
        *,
        finish: FinishReason | None = None,
        error: Exception | None = None,
        tokens: tuple[MadeToken, ...] = (),
    ) -> None:
        self._scorer.finish(sequence, self._scheduler)
        self._scheduler.remove(sequence)
        request_id = sequence.request.request_id
        del self._open[request_id]
        stats = stats_of(sequence, time.perf_counter()) if finish else None
        self._outputs.append(StepOutput(request_id, tokens, finish, stats, error))

    def _abort_all(self) -> None:
        for sequence in list(self._open.values()):
            self._end(sequence, error=UnavailableError("the model is being unloaded and the grace period is over"))
            self._aborted += 1

    def _tell(self) -> None:
        if not self._outputs:
            return
        outputs, self._outputs = self._outputs, []
        try:
            self._deliver(outputs)
        except Exception:
            # The fault of one listener must not end the answers of the others.
            self.log.exception("outputs were not delivered", requests=[output.request_id for output in outputs])

    def _take_snapshot(self) -> LoopSnapshot:
        scheduler = self._scheduler
        return LoopSnapshot(
            mode=self._mode,
            generation=self._generation,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_total=scheduler.pool.num_blocks,
            blocks_free=scheduler.pool.num_free,
            steps=self._steps,
            tokens_by_mode=self._tokens_by_mode.copy(),
            requests_by_mode=dict(Counter(sequence.mode for sequence in scheduler.sequences)),
            requests_by_graph=dict(Counter(sequence.served_by for sequence in scheduler.sequences)),
            tokens_by_engine=dict(self._tokens_by_engine),
            slots_used=self._slots.num_used_slots if self._slots else 0,
            moves=self._slots.num_moves if self._slots else 0,
        )


def stats_of(sequence: Sequence, now: float) -> RequestStats:
    """Times of a request that ends `now` (seconds); what it never reached counts as reached now."""
    started = now if sequence.started is None else sequence.started
    first_token = now if sequence.first_token is None else sequence.first_token
    arrived = sequence.arrived
    return RequestStats(started - arrived, first_token - arrived, now - arrived, sequence.preemptions)
