"""[monitor]: how live answers are measured, when a mode falls back, and which rules choose modes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from dskd.monitor.states import Repair, Scope
from dskd.typed_toml import Between, OneOf
from dskquant.modes import LADDER, QUANTIZED, PrecisionMode

NEXT = "next"
"""As a target: the resident mode one step more exact than the one that is too noisy."""

SMALLEST_KL = 1e-6
"""Nats; below it the rounding of float32 logits is louder than any quantization."""

LARGEST_KL = 1e6
"""Nats; above what any two finite distributions of float32 logits have: a limit that is never reached."""

LARGEST_FACTOR = 1e6
LONGEST_S = 366 * 86400.0
"""A year: nothing that a daemon waits for or remembers takes longer."""

MOST_REQUESTS = 1_000_000
"""That can be open or wait at once."""

KlLimit = Annotated[float, Between(SMALLEST_KL, LARGEST_KL)]


@dataclass(frozen=True, slots=True)
class ThresholdConfig:
    """[monitor.threshold]: mean KL(reference || mode), nats per token, above which a mode falls back.

    A mode without one has `factor` times what its parameter set was measured to have.
    """

    int4: KlLimit | None = None
    int8: KlLimit | None = None
    fp16: KlLimit | None = None


@dataclass(frozen=True, slots=True)
class LongContextConfig:
    """[monitor.long_context]: sequences of at least `tokens` tokens are served in at least `mode`."""

    tokens: Annotated[int, Between(1, 1 << 31)]
    mode: PrecisionMode


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """[monitor.load]: a lower mode while many requests wait, as long as its noise stays within a limit."""

    mode: PrecisionMode
    queue: Annotated[int, Between(0, MOST_REQUESTS)]  # more requests than this wait: `mode` may serve
    max_kl: KlLimit  # mean KL of `mode`, nats per token, above which it may not
    quiet_s: Annotated[float, Between(0, LONGEST_S)] = 30.0  # nobody has waited for this long: back up


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """[monitor]: all of it."""

    share: Annotated[float, Between(0, 1)] = 0.05  # of the made tokens that are scored by the reference
    time_share: Annotated[float, Between(0, 1)] = 0.02  # of the loop's time that scoring may take
    reference: PrecisionMode | None = None  # None: the most exact resident mode
    own_context: bool = False  # the reference computes the whole sequence anew, instead of reading the served cache
    window: Annotated[int, Between(40, 100_000)] = 512  # samples of a mode that statistics are made of
    window_s: Annotated[float, Between(1, LONGEST_S)] = 300.0  # none older than this
    scope: Scope = Scope.MODEL
    target: Annotated[str, OneOf((NEXT, *(mode.value for mode in LADDER[1:])))] = PrecisionMode.FP32.value
    escalation_share: Annotated[float, Between(0.001, 1)] = 0.05  # of the others' time, for each escalated request
    repair: Repair = Repair.NONE
    threshold: ThresholdConfig = ThresholdConfig()
    factor: Annotated[float, Between(1, LARGEST_FACTOR)] = 2.0  # times the expected KL, where no threshold is given
    min_agreement: Annotated[float, Between(0, 0.99)] = 0.5  # share of tokens with the reference's most probable one
    false_trip_samples: Annotated[float, Between(10, 1e12)] = 100_000.0  # mean between false trips of a model, at worst
    hysteresis: Annotated[float, Between(0.1, 1)] = 0.8  # noise is gone below this share of the threshold
    dwell_s: Annotated[float, Between(0.1, LONGEST_S)] = 30.0  # a fallback lasts at least this long
    max_dwell_s: Annotated[float, Between(0.1, LONGEST_S)] = 900.0  # it doubles up to this while trials fail
    prefill: PrecisionMode | None = None  # mode of prompts; None: that of the answer
    long_context: LongContextConfig | None = None
    load: LoadConfig | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.max_dwell_s < self.dwell_s:
            yield "max_dwell_s", f"{self.max_dwell_s} must not be below dwell_s, {self.dwell_s}"
        if self.factor * self.hysteresis <= 1:
            yield "factor", f"must be above 1 / hysteresis, {1 / self.hysteresis:g}: expected noise would never be low"
        if self.load is not None and self.load.mode not in QUANTIZED:
            yield "load.mode", f"{self.load.mode.value} is not a faster mode; allowed: int4, int8"
