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


class NoiseMeasure(enum.Enum):
    """What figures of noise are. Where the code says KL it means this one, whichever the model has."""

    KL = "kl"  # KL(reference || mode), nats per token: of language models
    NOISE_TO_SIGNAL = "noise_to_signal"  # power of the error over power of the answer, 10^(-SQNR / 10): of plain graphs


class Phase(enum.Enum):
    """What a sequence does in a step."""

    PREFILL = "prefill"
    DECODE = "decode"
