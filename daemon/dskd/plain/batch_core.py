"""What the batch loop of a plain graph does between and in batches. Belongs to one thread."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from dskd.config import BatchingConfig
from dskd.engine.request import (
    FlipReport,
    InFlight,
    LoopSnapshot,
    ModeRules,
    NonFinite,
    Observation,
    ScoringPlan,
)
from dskd.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from dskd.monitor.rules import Situation, effective_mode
from dskd.monitor.states import Phase
from dskd.plain.request import TensorAnswer, UncomputableError
from dskd.plain.scoring import NAP_S, ShadowScorer, is_finite
from dskd.plain.served_graph import ServedGraph
from dskd.plain.waiting import GraphKey, Waiting, WaitingLine
from dskquant.errors import QuantError
from dskquant.modes import LADDER, PrecisionMode
from dskquant.plain.protocol import Tensors

RETRY_AFTER_S = 0.5

Outcome = tuple[Waiting, TensorAnswer | Exception]
Deliver = Callable[[list[Outcome]], None]


class BatchCore:
    """The state of a batch loop: graphs, the line of requests, what serves."""

    def __init__(
        self,
        model: str,
        limits: BatchingConfig,
        max_waiting: int,
        mode: PrecisionMode,
        generation: int,
        deliver: Deliver,
        observe: Callable[[list[Observation]], None],
    ) -> None:
        self.log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger().bind(model=model)
        self._line = WaitingLine(limits)
        self._max_waiting = max_waiting
        self._mode = mode
        self._generation = generation
        self._deliver = deliver
        self._observe = observe
        self._graphs: dict[GraphKey, ServedGraph] = {}
        self._rules = ModeRules()
        self._scorer = ShadowScorer(observe)
        self._is_suspended = False
        self._draining: tuple[float, Future[int]] | None = None
        self._batches = 0
        self._answered: Counter[PrecisionMode] = Counter()
        self.snapshot = LoopSnapshot(mode, generation)

    # Asked for

    def submit(self, entry: Waiting) -> None:
        """Puts a request into the line; one that cannot be is answered why."""
        refusal = self._refusal()
        if refusal is not None:
            self._deliver([(entry, refusal)])
            return
        self._line.add(entry)

    def _refusal(self) -> Exception | None:
        if self._draining is not None:
            return UnavailableError("the model is being unloaded")
        if len(self._line) >= self._max_waiting:
            waiting = f"{len(self._line)} requests wait, as many as max_waiting allows"
            return ResourceExhaustedError("requests", waiting, RETRY_AFTER_S)
        return None

    def cancel(self, entry: Waiting) -> bool:
        """Takes a request out of the line; False if its batch has begun."""
        return self._line.remove(entry)

    def install(self, generation: int, graph: ServedGraph) -> None:
        if (generation, graph.mode) in self._graphs:
            raise FailedPreconditionError(graph.mode.value, f"{graph.mode.value} has a graph in {generation} already")
        self._graphs[generation, graph.mode] = graph

    def flip(self, mode: PrecisionMode, generation: int, in_flight: InFlight) -> FlipReport:
        began, before = time.perf_counter(), self._mode
        if (generation, mode) not in self._graphs:
            raise FailedPreconditionError(mode.value, f"{mode.value} of generation {generation} is not in memory")
        served = {entry: self._graph_of(entry) for entry in self._line}
        self._mode, self._generation = mode, generation
        for entry, key in served.items():
            entry.stays = key if in_flight is InFlight.FINISH else None
        migrated = sum(self._graph_of(entry) != key for entry, key in served.items())
        return FlipReport(before, mode, generation, (time.perf_counter() - began) * 1e6, migrated)

    def retire(self, generation: int, modes: Iterable[PrecisionMode]) -> bool:
        keys = self._installed(generation, modes)
        if (self._generation, self._mode) in keys:
            raise FailedPreconditionError(self._mode.value, f"{self._mode.value} is active")
        if any(self._graph_of(entry) in keys for entry in self._line):
            return False
        self._forget(keys)
        return True

    def suspend(self, generation: int, modes: Iterable[PrecisionMode]) -> None:
        self._forget(self._installed(generation, modes))
        self._is_suspended = True

    def resume(self) -> None:
        self._is_suspended = False
        lost = [entry for entry in self._line if self._graph_of(entry) not in self._graphs]
        self._end(lost, UnavailableError("the mode of the request is no longer in memory"))

    def _installed(self, generation: int, modes: Iterable[PrecisionMode]) -> set[GraphKey]:
        keys = {(generation, mode) for mode in modes}
        for _, mode in keys - self._graphs.keys():
            raise FailedPreconditionError(mode.value, f"{mode.value} of generation {generation} is not in memory")
        return keys

    def _forget(self, keys: Iterable[GraphKey]) -> None:
        for key in keys:
            del self._graphs[key]

    def set_rules(self, rules: ModeRules) -> None:
        self._rules = rules

    def set_scoring(self, plan: ScoringPlan | None) -> None:
        self._scorer.set_plan(plan)

    def set_preparing(self, is_preparing: bool) -> None:
        self._scorer.is_paused = is_preparing

    def drain(self, grace_s: float, done: Future[int]) -> None:
        self._draining = time.perf_counter() + grace_s, done

    # Batches

    def patience(self) -> float:
        """Seconds until there is something to do, unless somebody asks for something; infinity: nothing will be."""
        now = time.perf_counter()
        line = math.inf if self._is_suspended else self._line.patience(now)
        drain = self._draining[0] - now if self._draining and self._line else math.inf
        scoring = NAP_S if self._scorer.has_work else math.inf
        return max(0.0, min(line, drain, scoring))

    def lacking_rows(self) -> int:
        """Rows that must come before there is something to do, unless time does; at least 1."""
        if self._is_suspended or self._draining is not None or not self._line:
            return 1
        room = self._max_waiting - len(self._line) + 1  # the request after that is refused
        return max(1, min(self._line.lacking_rows(self._graph_of), room))

    def run_batch(self) -> bool:
        """Runs the next batch if one is due; whether it did."""
        batch = [] if self._is_suspended else self._line.take(time.perf_counter(), self._graph_of)
        if batch:
            self.snapshot = replace(self.snapshot, running=len(batch), waiting=len(self._line))
            self._run(batch)
        return bool(batch)

    def score(self) -> None:
        """Compares a sample with the reference, if time for it has been earned."""
        self._scorer.score(self._graphs)

    def settle(self) -> None:
        """After batches and commands: ends what has waited too long, and shows how things are."""
        if self._draining is not None:
            self._end_drain(*self._draining)
        keys = [self._graph_of(entry) for entry in self._line]
        self.snapshot = LoopSnapshot(
            mode=self._mode,
            generation=self._generation,
            waiting=len(keys),
            steps=self._batches,
            tokens_by_mode=dict(self._answered),
            requests_by_mode=dict(Counter(mode for _, mode in keys)),
            requests_by_graph=dict(Counter(keys)),
        )

    def abandon(self, reason: Exception) -> None:
        """Ends all requests."""
        self._end(list(self._line), reason)
        if self._draining is not None and not self._draining[1].done():
            self._draining[1].set_result(0)

    def _end_drain(self, deadline: float, done: Future[int]) -> None:
        if done.done():
            return
        left = list(self._line)
        if left and time.perf_counter() < deadline:
            return
        self._end(left, UnavailableError("the model was unloaded before the request was answered"))
        done.set_result(len(left))

    def _end(self, entries: list[Waiting], reason: Exception) -> None:
        for entry in entries:
            self._line.remove(entry)
        if entries:
            self._deliver([(entry, reason) for entry in entries])

    def _graph_of(self, entry: Waiting) -> GraphKey:
        """What serves a request if its batch runs now."""
        if entry.stays is not None and entry.stays in self._graphs:
            return entry.stays
        wanted = entry.request.precision
        if wanted is not None:
            newest = (self._generation, wanted)
            return newest if newest in self._graphs else (entry.generation, wanted)
        mode = self._bent_mode() if self._rules.bend else self._mode
        return (self._generation, mode if (self._generation, mode) in self._graphs else self._mode)

    def _bent_mode(self) -> PrecisionMode:
        rules = self._rules
        situation = Situation(
            self._mode, Phase.DECODE, 0, pin=rules.pin, fallback=rules.fallback, lowered=rules.lowered
        )
        return effective_mode(situation, rules.config).mode

    def _run(self, batch: Sequence[Waiting]) -> None:
        key, began = self._graph_of(batch[0]), time.perf_counter()
        if key not in self._graphs:
            lost = UnavailableError(f"{key[1].value} is no longer in memory")
            self._deliver([(entry, lost) for entry in batch])
            return
        try:
            tensors, graph = self._compute(key, batch)
            parts = split(tensors, [entry.rows for entry in batch])
        except QuantError as error:
            self._run_apart(batch, error)
            return
        self._batches += 1
        compute_s, rows = time.perf_counter() - began, sum(entry.rows for entry in batch)
        answers = [
            TensorAnswer(part, graph.mode, key[0], graph.engine, began - entry.arrived, compute_s, rows)
            for entry, part in zip(batch, parts, strict=True)
        ]
        self._answered[graph.mode] += len(batch)
        self._deliver(list(zip(batch, answers, strict=True)))
        for entry, answer in zip(batch, answers, strict=True):
            self._scorer.offer(entry.request, answer)

    def _run_apart(self, batch: Sequence[Waiting], error: QuantError) -> None:
        """What one request of a batch has caused, the others need not suffer."""
        if len(batch) == 1:
            self._deliver([(batch[0], UncomputableError(str(error)))])
        else:
            for entry in batch:
                self._run([entry])

    def _compute(self, key: GraphKey, batch: Sequence[Waiting]) -> tuple[Tensors, ServedGraph]:
        """The outputs for all rows of `batch`, and the graph that made them.

        Where a quantized mode makes values that are not finite and a more exact one does not, that one's are taken.
        """
        inputs = joined([entry.request.tensors for entry in batch])
        graph = self._graphs[key]
        outputs = graph.run(inputs)
        better = None if is_finite(outputs) else self._more_exact(key)
        if better is None:
            return outputs, graph
        redone = better.run(inputs)
        if not is_finite(redone):
            return outputs, graph
        self._observe([NonFinite(batch[0].request.request_id, key[0], key[1], better.mode)])
        return redone, better

    def _more_exact(self, key: GraphKey) -> ServedGraph | None:
        generation, mode = key
        above = LADDER[LADDER.index(mode) + 1 :]
        found = [self._graphs[generation, other] for other in above if (generation, other) in self._graphs]
        return found[-1] if found else None


def joined(requests: Sequence[Tensors]) -> Tensors:
    """The inputs of a batch; those of a single request as they are."""
    if len(requests) == 1:
        return requests[0]
    return {name: np.concatenate([tensors[name] for tensors in requests]) for name in requests[0]}


def split(outputs: Tensors, rows: Sequence[int]) -> list[dict[str, NDArray[Any]]]:
    """The outputs of each request of a batch. Raises QuantError for an output that has not a row for each."""
    if len(rows) == 1:
        return [dict(outputs)]
    for name, tensor in outputs.items():
        if tensor.shape[:1] != (sum(rows),):
            raise QuantError(f"output {name}: shape {list(tensor.shape)} for a batch of {sum(rows)} rows")
    ends = np.cumsum(rows)
    return [
        {name: tensor[end - count : end] for name, tensor in outputs.items()}
        for count, end in zip(rows, ends.tolist(), strict=True)
    ]
