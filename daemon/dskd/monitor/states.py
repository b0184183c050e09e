"""States and causes of the fallback. Imports nothing of the project."""

from __future__ import annotations

import enum


class FallbackState(enum.Enum):
    """What the noise of a mode has led to."""

    HEALTHY = "healthy"  # the mode serves
    TRIPPED = "tripped"  # the fallback serves in its place
    COOLING = "cooling"  # the mode serves again, on trial


class Cause(enum.Enum):
    """What a fallback answers to."""

    NOISE = "noise"  # mean KL above the threshold
    DISAGREEMENT = "disagreement"  # the most probable token is too often another one
    NON_FINITE = "non-finite"


class Scope(enum.Enum):
    """What falls back together."""

    REQUEST = "request"  # only the request that suffers
    MODEL = "model"


class Repair(enum.Enum):
    """What becomes of the keys and values that the noisy mode wrote."""

    NONE = "none"  # they stay
    REPREFILL = "reprefill"  # computed again by the fallback before the next token


class Phase(enum.Enum):
    """What a sequence does in a step."""

    PREFILL = "prefill"
    DECODE = "decode"
