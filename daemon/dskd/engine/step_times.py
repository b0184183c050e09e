"""How long a decode step takes, by engine, mode and number of rows: measured once, then learned from what is served."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import NamedTuple

from dskquant.modes import PrecisionMode

LEARNING_RATE = 0.1
"""Of a new time in the moving average."""

OUTLIER = 3.0
"""A step that took so many times the average was held up by something else."""


class StepKind(NamedTuple):
    """What the time of a decode step depends on."""

    engine: str
    mode: PrecisionMode
    rows: int


class StepTimes:
    """Seconds of decode steps. Written by the step loop's thread alone, once it runs; `known` may be read by others."""

    def __init__(self, seconds: Mapping[StepKind, float] | None = None) -> None:
        self._seconds = dict(seconds or {})
        self._learned = dict.fromkeys(self._seconds, time.monotonic())  # when; of what was known before, now

    @property
    def known(self) -> dict[StepKind, float]:
        return self._seconds.copy()

    def knows(self, engine: str, mode: PrecisionMode) -> bool:
        return any((kind.engine, kind.mode) == (engine, mode) for kind in self.known)

    def set(self, kind: StepKind, seconds: float) -> None:
        """Takes a measurement as it is."""
        self._seconds[kind] = seconds
        self._learned[kind] = time.monotonic()

    def learned(self, kind: StepKind) -> float:
        """When the time of exactly this step was found out last (seconds of `time.monotonic`)."""
        return self._learned.get(kind, -math.inf)

    def learn(self, kind: StepKind, seconds: float) -> None:
        """Takes the time of a step that was served into the average."""
        known = self.estimate(kind)
        self._learned[kind] = time.monotonic()
        if known is None or known <= 0:
            self._seconds[kind] = seconds
            return
        self._seconds[kind] = known + LEARNING_RATE * (min(seconds, OUTLIER * known) - known)

    def compare(self, engines: Collection[str], mode: PrecisionMode) -> dict[int, list[tuple[str, float]]]:
        """By number of rows for which all of `engines` are known: the seconds of each."""
        known = self.known
        rows = sorted({kind.rows for kind in known})
        found = {count: [(name, known.get(StepKind(name, mode, count))) for name in engines] for count in rows}
        return {
            count: [(name, seconds) for name, seconds in pairs if seconds is not None]
            for count, pairs in found.items()
            if all(seconds is not None for _, seconds in pairs)
        }

    def estimate(self, kind: StepKind) -> float | None:
        """Seconds of such a step: between two known numbers of rows in proportion, beyond them as the nearest one.

        None where nothing is known of the engine and mode.
        """
        if (exactly := self._seconds.get(kind)) is not None:
            return exactly
        known = sorted(
            (other.rows, seconds)
            for other, seconds in self._seconds.items()
            if (other.engine, other.mode) == (kind.engine, kind.mode)
        )
        if not known:
            return None
        index = bisect_left(known, (kind.rows, 0.0))
        if index in (0, len(known)):
            return known[min(index, len(known) - 1)][1]
        (low, low_s), (high, high_s) = known[index - 1 : index + 1]
        return low_s + (high_s - low_s) * (kind.rows - low) / (high - low)
