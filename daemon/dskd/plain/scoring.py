"""Shadow scoring of plain graphs: sampled requests are run again on the reference, and both answers compared."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import structlog

from dskd.engine.request import BlockScore, Observation, ScoringPlan
from dskd.manager.proof import ratio_of_db
from dskd.monitor.rules import is_above
from dskd.monitor.shadow import TimeBudget, is_sampled
from dskd.monitor.states import NoiseMeasure
from dskd.plain.request import TensorAnswer, TensorRequest
from dskd.plain.served_graph import ServedGraph
from dskd.plain.waiting import GraphKey
from dskquant.errors import QuantError, TensorError
from dskquant.modes import PrecisionMode
from dskquant.plain.noise import GraphNoise
from dskquant.plain.protocol import Tensors

MOST_PENDING = 4
"""Samples that wait to be scored; while so many do, no more are taken."""

NAP_S = 0.05
"""Between two looks whether the time for the next sample has been earned."""

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


@dataclass(frozen=True, slots=True)
class _Sample:
    request: TensorRequest
    answer: TensorAnswer
    made: float  # seconds of `time.monotonic`


class ShadowScorer:
    """Belongs to the thread of the batch loop."""

    def __init__(self, observe: Callable[[list[Observation]], None]) -> None:
        self._observe = observe
        self._pending: deque[_Sample] = deque()
        self._answers = 0
        self._earned = time.perf_counter()
        self.set_plan(None)
        self.is_paused = False

    def set_plan(self, plan: ScoringPlan | None) -> None:
        """Scores by `plan` from now on; None: not at all."""
        self._plan = plan if plan is not None and plan.time_share else None
        self._budget = TimeBudget(plan.time_share if plan else 0.0)
        self._pending.clear()

    @property
    def has_work(self) -> bool:
        return bool(self._pending) and not self.is_paused

    def offer(self, request: TensorRequest, answer: TensorAnswer) -> None:
        """Takes the answer for a sample if it is its turn."""
        if self._scored_mode(answer) is None or self._plan is None:
            return
        self._answers += 1
        if is_sampled(0.0, self._answers, self._plan.share) and len(self._pending) < MOST_PENDING:
            self._pending.append(_Sample(request, answer, time.monotonic()))

    def score(self, graphs: Mapping[GraphKey, ServedGraph]) -> bool:
        """Scores one sample if the time for it has been earned; whether it was."""
        now = time.perf_counter()
        self._budget.earn(now - self._earned)
        self._earned = now
        if not self.has_work or not self._budget.allows:
            return False
        self._score(self._pending.popleft(), graphs)
        self._budget.spend(time.perf_counter() - now)
        return True

    def _scored_mode(self, answer: TensorAnswer) -> PrecisionMode | None:
        """The mode that an answer tells something of: its own, or the probe where the reference served."""
        if self._plan is None:
            return None
        if is_above(self._plan.reference, answer.mode):
            return answer.mode
        return self._plan.probe if answer.mode is self._plan.reference else None

    def _score(self, sample: _Sample, graphs: Mapping[GraphKey, ServedGraph]) -> None:
        plan, mode, served = self._plan, self._scored_mode(sample.answer), sample.answer
        if plan is None or mode is None:
            return
        other = graphs.get((served.generation, plan.reference if mode is served.mode else mode))
        if other is None:
            return
        try:
            answers = other.run(sample.request.tensors)
        except QuantError as error:
            log.warning("an answer cannot be scored", mode=other.mode.value, reason=str(error))
            return
        pair = (answers, served.tensors) if mode is served.mode else (served.tensors, answers)
        figures = _compare(*pair)
        if figures is not None:
            self._observe([_observation(sample, plan.reference, mode, *figures)])


def _observation(
    sample: _Sample, reference: PrecisionMode, mode: PrecisionMode, ratio: float, agrees: bool
) -> BlockScore:
    return BlockScore(
        request_id=sample.request.request_id,
        generation=sample.answer.generation,
        mode=mode,
        reference=reference,
        is_probe=mode is not sample.answer.mode,
        kl=np.array([ratio]),
        agrees=np.array([agrees]),
        rank=np.zeros(1, np.int64),
        made=np.array([sample.made]),
        measure=NoiseMeasure.NOISE_TO_SIGNAL,
    )


def _compare(reference: Tensors, answers: Tensors) -> tuple[float, bool] | None:
    """Noise-to-signal ratio of `answers`, and whether most rows have the same class; None: nothing can be said."""
    if not is_finite(reference):
        return None
    try:
        noise = GraphNoise.between(reference, answers)
    except TensorError:
        return math.inf, False
    except ValueError:
        return None
    return ratio_of_db(noise.sqnr_db), noise.top1 is None or noise.top1 >= 0.5


def is_finite(tensors: Tensors) -> bool:
    """Whether all floats are."""
    return all(tensor.dtype.kind != "f" or bool(np.isfinite(tensor).all()) for tensor in tensors.values())
