"""One request in the engine: its tokens, its place in the cache, and what serves it."""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from dskd.engine.block_keys import BlockKeys
from dskd.engine.request import FinishReason, GenerationRequest
from dskd.engine.sampler import TokenSampler
from dskd.monitor.health import Repetition
from dskd.monitor.states import Phase
from dskquant.engines.protocol import Int32
from dskquant.modes import PrecisionMode

NO_BLOCKS: Int32 = np.empty(0, np.int32)
NEVER = sys.maxsize


class Sequence:
    """Mutable state of one open request; only the step loop writes it."""

    __slots__ = (
        "arrived",
        "base_mode",
        "blocks",
        "fallback",
        "first_token",
        "generation",
        "keys",
        "mode",
        "num_cached",
        "num_published",
        "num_reused",
        "preemptions",
        "publishes_beyond",
        "repetition",
        "request",
        "sampler",
        "started",
        "tokens",
    )

    def __init__(
        self, request: GenerationRequest, mode: PrecisionMode, generation: int = 0, arrived: float = 0.0
    ) -> None:
        self.request = request
        self.mode = mode  # of its next step
        self.base_mode = mode  # that of the model, as far as it follows it
        self.fallback: PrecisionMode | None = None  # serves it at least, for its own answer is too noisy
        self.generation = generation
        self.sampler = TokenSampler(request.sampling, request.prompt, request.top_logprobs)
        self.tokens = list(request.prompt)  # prompt, then made tokens
        self.num_cached = 0  # leading tokens whose keys and values are in the cache
        self.num_reused = 0  # leading tokens of the prompt that others had left in the cache
        self.blocks = NO_BLOCKS  # never written in place: replaced when it grows
        self.keys: BlockKeys | None = None  # of `blocks`; None: it has not looked for shared ones yet
        self.num_published = 0  # leading blocks that are shared, or hold the same as a block that is
        self.publishes_beyond = NEVER  # number of tokens beyond which it has another block to publish
        self.preemptions = 0
        self.repetition = Repetition()
        self.arrived = arrived  # seconds, as `started` and `first_token`
        self.started: float | None = None
        self.first_token: float | None = None

    @property
    def num_uncached(self) -> int:
        return len(self.tokens) - self.num_cached

    @property
    def served_by(self) -> tuple[int, PrecisionMode]:
        """Generation and mode: what the graph of its next step is derived from."""
        return self.generation, self.mode

    @property
    def is_escalated(self) -> bool:
        """Whether it is served in another mode than its model, for its own sake."""
        return self.fallback is not None and self.mode is not self.base_mode

    @property
    def phase(self) -> Phase:
        """Of its next step: the last token of a prompt alone is as good as an answer."""
        return Phase.PREFILL if self.num_uncached > 1 else Phase.DECODE

    @property
    def max_cached(self) -> int:
        """Tokens in the cache when it has reached its full length; the last made token is never written."""
        return len(self.request.prompt) + self.request.max_new_tokens - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the token made last ends the request; None if it goes on."""
        if self.tokens[-1] in self.request.end_token_ids:
            return FinishReason.END_OF_TEXT
        if len(self.tokens) > self.max_cached:
            return FinishReason.LENGTH
        return None


class Chunk(NamedTuple):
    """What one step does for one sequence: its next `num_tokens` uncached tokens go through the graph."""

    sequence: Sequence
    num_tokens: int

    @property
    def wants_logits(self) -> bool:
        """Whether it ends with the last known token, so that the next one can be drawn; asked before it is run."""
        return self.num_tokens == self.sequence.num_uncached

    @property
    def is_decode(self) -> bool:
        """Whether it is the one token after which the answer goes on; asked before it is run."""
        return self.num_tokens == 1 and self.wants_logits
