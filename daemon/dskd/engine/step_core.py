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
from dskd.engine.graph_table import GraphTable
from dskd.engine.request import (
    FinishReason,
    FlipReport,
    GenerationRequest,
    InFlight,
    LoopSnapshot,
    MadeToken,
    RequestStats,
    StepOutput,
)
from dskd.engine.sampler import Draw, NonFiniteLogitsError, draw_tokens
from dskd.engine.scheduler import Scheduler
from dskd.engine.sequence import Chunk, Sequence
from dskd.errors import FailedPreconditionError, InternalError, InvalidArgumentError, UnavailableError
from dskquant.engines.protocol import Graph
from dskquant.modes import PrecisionMode


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
    ) -> None:
        self.log = structlog.get_logger().bind(model=model, engine=engine_name)
        self._engine_name = engine_name
        self._scheduler = scheduler
        self._mode = mode
        self._generation = generation
        self._deliver = deliver
        self._graphs = GraphTable()
        self._open: dict[str, Sequence] = {}
        self._outputs: list[StepOutput] = []
        self._drains: list[Future[int]] = []
        self._drain_deadline = math.inf
        self._aborted = 0
        self._is_suspended = False
        self._steps = 0
        self._tokens_by_mode = dict.fromkeys(PrecisionMode, 0)
        self.snapshot = self._take_snapshot()

    @property
    def is_idle(self) -> bool:
        return not self._scheduler.has_sequences

    @property
    def has_work(self) -> bool:
        return not self._is_suspended and not self.is_idle

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
        self._scheduler.add(sequence)
        self._open[request.request_id] = sequence

    def cancel(self, request_id: str) -> bool:
        """Ends a request; False if it is not open."""
        sequence = self._open.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, finish=FinishReason.CANCELLED)
        return True

    def install(self, generation: int, graph: Graph) -> None:
        """Makes `graph` available for its modes."""
        self._graphs.install(generation, graph)

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
        if any(sequence.generation == generation and sequence.mode in modes for sequence in self._scheduler.sequences):
            return False
        self._graphs.drop(generation, modes)
        return True

    def suspend(self, generation: int, modes: frozenset[PrecisionMode]) -> None:
        """Holds all steps until `resume`, and forgets these graphs though they may be in use."""
        self._graphs.drop(generation, modes)
        self._is_suspended = True

    def resume(self) -> None:
        """Goes on with the steps; requests whose graph has not come back end with UnavailableError."""
        self._is_suspended = False
        for sequence in list(self._scheduler.sequences):
            if sequence.served_by not in self._graphs:
                reason = f"{sequence.mode.value} of generation {sequence.generation} is gone"
                self._end(sequence, error=UnavailableError(reason))

    def drain(self, grace_s: float, done: Future[int]) -> None:
        """Refuses new requests; `done` resolves, with the number of those aborted, when none is open any more."""
        self._drain_deadline = min(self._drain_deadline, time.perf_counter() + grace_s)
        self._drains.append(done)

    # Steps

    def step(self) -> None:
        """Runs one step of every graph that has work. Raises InternalError, rather than spin, if nothing can run."""
        chunks = self._scheduler.schedule()
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
        for graph, its_chunks in by_graph.values():
            self._run(graph, its_chunks)
        self._steps += 1

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
        self._scheduler = Scheduler(self._scheduler.config, BlockPool(pool.num_blocks, pool.block_size))
        self.settle()

    def _run(self, graph: Graph, chunks: list[Chunk]) -> None:
        ready = [chunk.sequence for chunk in chunks if chunk.wants_logits]
        try:
            logits = graph.run(build_batch(chunks, self._scheduler.pool.block_size))
            draws = draw_tokens(logits, [sequence.sampler for sequence in ready]) if ready else []
        except Exception:
            self._fail([chunk.sequence for chunk in chunks])
            return
        for chunk in chunks:
            self._scheduler.postprocess(chunk)
        for sequence, draw in zip(ready, draws, strict=True):
            if isinstance(draw, NonFiniteLogitsError):
                self._refuse_logits(sequence)
            else:
                self._accept(sequence, draw)

    def _accept(self, sequence: Sequence, draw: Draw) -> None:
        mode = sequence.mode
        token = MadeToken(draw.id, mode, sequence.generation, self._engine_name, draw.logprob, draw.top_logprobs)
        sequence.tokens.append(draw.id)
        if sequence.first_token is None:
            sequence.first_token = time.perf_counter()
        self._tokens_by_mode[mode] += 1
        finish = sequence.finish_reason
        if finish is None:
            stats = stats_of(sequence, time.perf_counter())
            self._outputs.append(StepOutput(sequence.request.request_id, (token,), stats=stats))
        else:
            self._end(sequence, finish=finish, tokens=(token,))

    def _refuse_logits(self, sequence: Sequence) -> None:
        mode, request_id = sequence.mode.value, sequence.request.request_id
        self.log.error("non-finite logits", generation=sequence.generation, mode=mode, request=request_id)
        self._end(sequence, error=InternalError(f"mode {mode} produced non-finite logits"))

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
                migrated += sequence.mode is not self._mode
                sequence.mode = self._mode
            if sequence.mode in offered:
                sequence.generation = self._generation
        return migrated

    # Ends

    def _end(
        self,
        sequence: Sequence,
        *,
        finish: FinishReason | None = None,
        error: Exception | None = None,
        tokens: tuple[MadeToken, ...] = (),
    ) -> None:
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
        )


def stats_of(sequence: Sequence, now: float) -> RequestStats:
    """Times of a request that ends `now` (seconds); what it never reached counts as reached now."""
    started = now if sequence.started is None else sequence.started
    first_token = now if sequence.first_token is None else sequence.first_token
    arrived = sequence.arrived
    return RequestStats(started - arrived, first_token - arrived, now - arrived, sequence.preemptions)
