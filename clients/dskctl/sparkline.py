"""Small charts of positive numbers in block characters, on a log scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = " ▁▂▃▄▅▆▇█"
LEVELS = len(BLOCKS) - 1
"""Heights that one character can show."""

MOST_DECADES = 5
SMALLEST = 1e-6


@dataclass(frozen=True, slots=True)
class LogScale:
    """Heights of values between two powers of ten."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> LogScale:
        """The decades that hold all finite `values`; of more than `MOST_DECADES` the greatest."""
        finite = [max(value, SMALLEST) for value in values if math.isfinite(value)] or [SMALLEST]
        high = math.floor(math.log10(max(finite))) + 1
        low = max(math.floor(math.log10(min(finite))), high - MOST_DECADES)
        return cls(10.0**low, 10.0**high)

    def height(self, value: float, levels: int) -> int:
        """1 to `levels`; what is off the scale, infinity too, is at its end."""
        inside = min(max(value, self.low), self.high)
        share = math.log10(inside / self.low) / math.log10(self.high / self.low)
        return min(1 + math.floor(share * levels), levels)


def bars(values: Sequence[float], scale: LogScale, rows: int) -> list[str]:
    """One column for each value, drawn in `rows` lines of equal length, the top one first."""
    heights = [scale.height(value, rows * LEVELS) for value in values]
    return ["".join(_block(height - row * LEVELS) for height in heights) for row in reversed(range(rows))]


def row_of(value: float, scale: LogScale, rows: int) -> int:
    """The line of `bars`, counted from the top, that `value` reaches into."""
    return rows - 1 - (scale.height(value, rows * LEVELS) - 1) // LEVELS


def _block(height: int) -> str:
    return BLOCKS[min(max(height, 0), LEVELS)]
