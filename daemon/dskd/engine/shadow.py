"""Shadow scoring: some of the blocks that sequences fill are computed again by another mode, and compared.

A block begins at a position whose past lies in whole blocks, which are read where they are; what the other mode writes
goes into scratch blocks. So nothing is copied but the served logits. Quantized modes compute again between two steps,
as they may share the graph that serves; float modes, whose graphs serve nobody meanwhile, do it in a thread beside it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import structlog

from dskd.engine.graph_table import GraphTable
from dskd.engine.recording import Job, Pair, Recording, as_job
from dskd.engine.request import BlockScore, Observation, ScoringPlan
from dskd.engine.scheduler import Scheduler
from dskd.engine.sequence import Sequence
from dskd.monitor.rules import is_above
from dskd.monitor.shadow import TimeBudget, is_sampled, phase_of, score
from dskd.priority import lower_priority
from dskquant.engines.protocol import Graph, Int32, Logits
from dskquant.modes import QUANTIZED, PrecisionMode

MOST_RECORDINGS = 8
"""Under way or waiting to be scored; each keeps up to a block of logit rows (6 MB for 50,000 tokens)."""

THRIFT = 0.25
"""Of the time that may be spent on scoring while a graph is being built: steps are slower then as it is."""

LEAST_POSITIONS = 4
"""That are worth a run of a graph."""


class ShadowScorer:
    """Belongs to the step loop's thread, which must call `run_next` between two steps."""

    def __init__(
        self,
        graphs: GraphTable,
        observe: Callable[[list[Observation]], None],
        ask: Callable[[Callable[[], None]], object],
    ) -> None:
        """`ask` makes the loop's thread call something between two steps; `observe` may be called from any thread."""
        self._graphs = graphs
        self._observe = observe
        self._ask = ask
        self._plan: ScoringPlan | None = None
        self._budget = TimeBudget(0.0)
        self.is_thrifty = False
        self._recordings: dict[str, Recording] = {}
        self._jobs: deque[Job] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._graph_lock = threading.Lock()  # of the float graph that the thread runs
        self._beside: tuple[int, PrecisionMode] | None = None  # what the thread runs just now
        self._log = structlog.get_logger()

    def set_plan(self, plan: ScoringPlan | None, scheduler: Scheduler) -> None:
        """Measures by `plan` from now on; what was begun by another one is dropped."""
        self._plan = plan
        self._budget = TimeBudget(plan.time_share if plan else 0.0)
        self._recordings.clear()
        self.drop_jobs(scheduler)

    @property
    def has_jobs(self) -> bool:
        """Whether `run_next` has something to begin."""
        return bool(self._jobs) and self._beside is None

    def uses(self, generation: int, modes: frozenset[PrecisionMode]) -> bool:
        """Whether one of these graphs is running in the thread just now."""
        return self._beside is not None and self._beside[0] == generation and self._beside[1] in modes

    @contextmanager
    def alone_with(self, graph: Graph) -> Iterator[None]:
        """Keeps the thread off `graph` while the loop runs it and reads its logits."""
        if graph.modes <= QUANTIZED:
            yield
        else:
            with self._graph_lock:
                yield

    # Recording

    def record(self, sequence: Sequence, row: Logits, scheduler: Scheduler) -> None:
        """Takes note of the logits that the newest token of `sequence` was drawn from."""
        if self._plan is None:
            return
        position = len(sequence.tokens) - 2  # of the token that was read
        key, block_size = sequence.request.request_id, scheduler.pool.block_size
        recording = self._recordings.get(key)
        if recording is not None and not recording.continues_at(position, sequence):
            self.finish(sequence, scheduler)
            recording = None
        if recording is None:
            recording = self._begin(sequence, position, block_size)
        if recording is None:
            return
        recording.add(row)
        if (position + 1) % block_size == 0:
            self.finish(sequence, scheduler)

    def finish(self, sequence: Sequence, scheduler: Scheduler) -> None:
        """Makes a job of what was recorded of `sequence`, while it still has its blocks."""
        recording = self._recordings.pop(sequence.request.request_id, None)
        if recording is None or self._plan is None or len(recording.rows) < LEAST_POSITIONS:
            return
        block = recording.first // scheduler.pool.block_size
        count = 0 if self._plan.own_context else block
        if len(sequence.blocks) < block:
            return  # it was preempted meanwhile
        past = sequence.blocks[:count]
        scheduler.lend(past)
        self._jobs.append(as_job(recording, count * scheduler.pool.block_size, past))

    def forget(self, sequence: Sequence) -> None:
        """Drops what was recorded of `sequence`, whose blocks are about to be given back."""
        self._recordings.pop(sequence.request.request_id, None)

    def drop_jobs(self, scheduler: Scheduler) -> None:
        """Gives back the blocks of all that waits to be computed again."""
        while self._jobs:
            scheduler.take_back(self._jobs.popleft().past)

    def _begin(self, sequence: Sequence, position: int, block_size: int) -> Recording | None:
        plan = self._plan
        if plan is None or len(self._recordings) + len(self._jobs) >= MOST_RECORDINGS:
            return None
        if not is_sampled(self._phase(sequence), position // block_size, plan.share):
            return None
        pair = self._pair(sequence, plan)
        if pair is None or (sequence.generation, pair.again) not in self._graphs:
            return None
        recording = self._recordings[sequence.request.request_id] = Recording(sequence, position, pair)
        return recording

    def _phase(self, sequence: Sequence) -> float:
        return phase_of(f"{sequence.request.request_id}/{sequence.request.sampling.seed}")

    def _pair(self, sequence: Sequence, plan: ScoringPlan) -> Pair | None:
        if plan.probe is not None and is_above(sequence.mode, plan.probe):
            return Pair(sequence.mode, plan.probe, True)
        return Pair(sequence.mode, plan.reference, False) if is_above(plan.reference, sequence.mode) else None

    # Computing again

    def earn(self, seconds: float) -> None:
        """The loop has run for `seconds`: a share of them may be spent on scoring."""
        self._budget.earn(seconds * THRIFT if self.is_thrifty else seconds)

    def run_next(self, scheduler: Scheduler, is_idle: bool) -> None:
        """Begins the oldest job if its time has been earned; when the loop `is_idle`, time costs nobody anything."""
        if not self.has_jobs or not (is_idle or self._budget.allows):
            return
        job = self._jobs.popleft()
        graph = self._graphs.get((job.generation, job.pair.again))
        wanted = scheduler.pool.blocks_for(len(job.tokens))
        if graph is None or wanted > scheduler.pool.num_free:
            scheduler.take_back(job.past)
            return
        scratch = scheduler.pool.allocate(wanted)
        scheduler.lend(scratch, is_taken=True)
        # the thread is slow, and holds the graph for as long as it runs it: not while requests need it
        if graph.modes <= QUANTIZED or any(
            sequence.served_by == (job.generation, job.pair.again) for sequence in scheduler.running
        ):
            self._run_here(job, graph, scratch, scheduler)
        else:
            self._run_beside(job, graph, scratch, scheduler)

    def _run_here(self, job: Job, graph: Graph, scratch: Int32, scheduler: Scheduler) -> None:
        began = time.perf_counter()
        try:
            logits = graph.run(job.batch(scratch)).copy()
        except Exception:
            self._log.exception("a shadow run failed", generation=job.generation, mode=job.pair.again.value)
            logits = None
        self._give_back(job, scratch, scheduler, time.perf_counter() - began)
        if logits is not None:
            self._executor().submit(self._tell, job, logits)

    def _run_beside(self, job: Job, graph: Graph, scratch: Int32, scheduler: Scheduler) -> None:
        self._beside = (job.generation, job.pair.again)

        def run() -> None:
            began = time.perf_counter()
            try:
                with self._graph_lock:
                    self._tell(job, graph.run(job.batch(scratch)))
            except Exception:
                self._log.exception("a shadow run failed", generation=job.generation, mode=job.pair.again.value)
            spent = time.perf_counter() - began
            self._ask(lambda: self._end_beside(job, scratch, scheduler, spent))

        self._executor().submit(run)

    def _end_beside(self, job: Job, scratch: Int32, scheduler: Scheduler, spent: float) -> None:
        self._beside = None
        self._give_back(job, scratch, scheduler, spent)

    def _give_back(self, job: Job, scratch: Int32, scheduler: Scheduler, spent: float) -> None:
        scheduler.take_back(job.past)
        scheduler.take_back(scratch)
        self._budget.spend(spent)

    def _tell(self, job: Job, logits: Logits) -> None:
        served_is_reference = job.pair.is_probe
        reference, measured = (job.served, logits) if served_is_reference else (logits, job.served)
        usable = np.isfinite(reference).all(axis=1)  # where the reference is not, nothing is known of the other
        if not usable.any():
            return
        scores = score(reference[usable], measured[usable], job.served_tokens[usable])
        mode, by = (job.pair.again, job.pair.served) if served_is_reference else (job.pair.served, job.pair.again)
        made = np.array(job.made)[usable]
        told = BlockScore(
            job.request_id, job.generation, mode, by, job.pair.is_probe, scores.kl, scores.agrees, scores.rank, made
        )
        self._observe([told])

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="shadow", initializer=lower_priority)
        return self._thread

    def abandon(self) -> None:
        """Forgets all that waits, with the scheduler that lent the blocks."""
        self._recordings.clear()
        self._jobs.clear()

    def close(self) -> None:
        """Waits for the run under way."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
