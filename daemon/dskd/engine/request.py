"""What goes into the step loop and what comes out of it. Plain values; no engine, no gRPC."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dskd.monitor.config import MonitorConfig
from dskd.monitor.states import NoiseMeasure
from dskquant.modes import PrecisionMode


class InFlight(enum.Enum):
    """What becomes of open requests at a flip."""

    MIGRATE = "migrate"  # their next token is made by the new mode, the KV cache is kept
    FINISH = "finish"  # they end on the old mode


class FinishReason(enum.Enum):
    """Why a request ended."""

    END_OF_TEXT = "end_of_text"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the logits. The defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request: every field is in range and prompt + max_new_tokens fits the context."""

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    end_token_ids: frozenset[int] = frozenset()
    precision: PrecisionMode | None = None  # None: follow the mode of the model
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class MadeToken:
    """One token of an answer and what made it."""

    id: int
    mode: PrecisionMode
    generation: int
    engine: str
    logprob: float | None = None  # set when top_logprobs > 0
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most probable first


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Seconds and counts of one request."""

    queue_s: float  # arrival to first step
    first_token_s: float  # arrival to first token
    total_s: float  # arrival to last token
    preemptions: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one request. The last output of a request has `finish` or `error` set."""

    request_id: str
    tokens: tuple[MadeToken, ...] = ()
    finish: FinishReason | None = None
    stats: RequestStats | None = None  # so far; set with tokens and with finish
    error: Exception | None = None  # a DskdError wherever possible

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """What the step loop measures of the answers it makes. The unit is a cache block of a sequence.

    A share of the blocks that sequences fill is computed a second time by another mode, into scratch blocks, and the
    logits of both are compared position by position.
    """

    reference: PrecisionMode  # scores every mode below it, where its graph is in memory
    share: float  # of the blocks; 0: none
    time_share: float  # of the loop's time, at most
    own_context: bool = False  # the reference reads a context it has computed itself, not the one that was served
    probe: PrecisionMode | None = None  # scored, although it does not serve, where a higher mode does


@dataclass(frozen=True, slots=True)
class BlockScore:
    """n positions of a request that two modes computed: how far `mode` is from `reference`. Arrays [n].

    A position of a plain graph is a whole request.
    """

    request_id: str
    generation: int
    mode: PrecisionMode
    reference: PrecisionMode
    is_probe: bool  # `reference` served, `mode` did not
    kl: NDArray[np.float64]  # of `measure`; infinity where `mode` was not finite
    agrees: NDArray[np.bool_]  # both have the same most probable token
    rank: NDArray[np.int64]  # tokens that `reference` finds more probable than the one that was served
    made: NDArray[np.float64]  # when each token was made, seconds of `time.monotonic`
    measure: NoiseMeasure = NoiseMeasure.KL


@dataclass(frozen=True, slots=True)
class HealthSample:
    """Signs of trouble in one made token, from the logits that were computed anyway."""

    request_id: str
    generation: int
    mode: PrecisionMode
    entropy: float  # nats
    margin: float  # the greatest logit less the second one
    unique_ngrams: float  # share of the recent n-grams of the answer that are different from each other


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A mode made logits that are not finite. They reached nobody."""

    request_id: str
    generation: int
    mode: PrecisionMode
    redone_in: PrecisionMode | None  # None: no higher mode was in memory, and the request has failed


Observation = BlockScore | HealthSample | NonFinite


@dataclass(frozen=True, slots=True)
class ModeRules:
    """What bends the mode of the model for single steps; see `dskd.monitor.rules` for who wins."""

    config: MonitorConfig = field(default_factory=MonitorConfig)
    fallback: PrecisionMode | None = None  # of all requests
    lowered: bool = False  # by the load rule
    pin: PrecisionMode | None = None  # by an operator

    @property
    def vary(self) -> bool:
        """Whether the mode of a sequence may change from step to step without any command."""
        return self.config.prefill is not None or self.config.long_context is not None

    @property
    def bend(self) -> bool:
        """Whether any sequence may be served in another mode than the model's."""
        return self.vary or self.lowered or self.fallback is not None or self.pin is not None


@dataclass(frozen=True, slots=True)
class FlipReport:
    """What a flip did."""

    from_mode: PrecisionMode
    to_mode: PrecisionMode
    generation: int
    microseconds: float  # loop time the flip took
    migrated: int  # open requests that changed mode


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """State of a step loop as it was after some recent step; for display, never for decisions."""

    mode: PrecisionMode | None = None
    generation: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    steps: int = 0
    tokens_by_mode: dict[PrecisionMode, int] = field(default_factory=dict)
    requests_by_mode: dict[PrecisionMode, int] = field(default_factory=dict)
    requests_by_graph: dict[tuple[int, PrecisionMode], int] = field(default_factory=dict)  # by generation and mode
    tokens_by_engine: dict[str, int] = field(default_factory=dict)
    slots_used: int = 0  # of the second engine
    moves: int = 0  # of decoding from one engine to the other
