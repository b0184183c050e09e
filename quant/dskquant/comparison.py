"""Measures how far each mode is from the reference on a text: perplexity, divergence, agreement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dskquant.divergence import Float64, kl_divergence, log_softmax
from dskquant.engines.protocol import CompileOptions, Engine, Graph
from dskquant.errors import QuantError
from dskquant.forward import blocks_for, forward
from dskquant.modes import LADDER, REFERENCE, PrecisionMode
from dskquant.store import TOKENIZER

PIECE = 128
"""Positions scored at once: bounds the memory of their distributions in float64."""


@dataclass(frozen=True, slots=True)
class ModeQuality:
    """One mode on a text."""

    mode: PrecisionMode
    positions: int
    perplexity: float  # exp of the mean negative log-likelihood of the next token, in nats
    mean_kl: float  # nats per token, of the reference's distribution from this mode's
    p99_kl: float
    agreement: float  # share of positions with the reference's most probable token


@dataclass(slots=True)
class _Scores:
    kl: list[Float64] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    negative_log_likelihood: list[float] = field(default_factory=list)

    def add(self, reference: Float64, served: Float64, next_tokens: Sequence[int]) -> None:
        """Scores log-probabilities [n, vocabulary]; the last position of a window has no next token."""
        self.kl.append(kl_divergence(reference, served))
        self.same += (reference.argmax(axis=1) == served.argmax(axis=1)).tolist()
        rows = np.arange(len(next_tokens))
        self.negative_log_likelihood += (-served[rows, list(next_tokens)]).tolist()

    def quality(self, mode: PrecisionMode) -> ModeQuality:
        kl = np.concatenate(self.kl)
        return ModeQuality(
            mode,
            len(kl),
            float(np.exp(np.mean(self.negative_log_likelihood))),
            float(kl.mean()),
            float(np.quantile(kl, 0.99)),
            float(np.mean(self.same)),
        )


def encode_text(store: Path, text: str, limit: int) -> list[int]:
    """The first `limit` tokens of `text`. Raises QuantError when there are fewer than two."""
    tokens: list[int] = Tokenizer.from_file(str(store / TOKENIZER)).encode(text).ids[:limit]
    if len(tokens) < 2:
        raise QuantError("the text is too short: at least two tokens are needed")
    return tokens


def compare_modes(
    store: Path,
    engine: Engine,
    tokens: Sequence[int],
    modes: Collection[PrecisionMode],
    options: CompileOptions,
    *,
    window: int = 512,
    progress: Callable[[int, int], None],
) -> list[ModeQuality]:
    """Runs every mode and the reference over `tokens`, cut into windows that each start from an empty cache.

    Takes the memory of the reference's graph and of the compared ones.
    """
    ordered = [mode for mode in LADDER if mode in modes or mode is REFERENCE]
    scores = {mode: _Scores() for mode in ordered}
    windows = [tokens[begin : begin + window] for begin in range(0, len(tokens), window)]
    with ExitStack() as stack:
        graphs: dict[frozenset[PrecisionMode], Graph] = {}
        for key in dict.fromkeys(options.graph_key(mode) for mode in ordered):
            graphs[key] = stack.enter_context(_compiled(store, engine, key, options, window))
        runs = [_Run(graphs[options.graph_key(mode)], mode, scores[mode]) for mode in ordered]
        for done, its_tokens in enumerate(windows):
            progress(done, len(windows))
            _score_window(runs, its_tokens, engine.block_size)
        progress(len(windows), len(windows))
    return [scores[mode].quality(mode) for mode in ordered]


class _Run(NamedTuple):
    graph: Graph
    mode: PrecisionMode
    scores: _Scores


@contextmanager
def _compiled(
    store: Path, engine: Engine, modes: frozenset[PrecisionMode], options: CompileOptions, window: int
) -> Iterator[Graph]:
    """A graph with a cache for one window in each of its modes, closed at the end."""
    graph = engine.compile(store, modes, options)
    try:
        graph.bind(graph.allocate_cache(len(modes) * blocks_for(window, engine.block_size)))
        yield graph
    finally:
        graph.close()


def _score_window(runs: Sequence[_Run], tokens: Sequence[int], block_size: int) -> None:
    """Runs all modes through a window in step, a piece at a time; the reference is the last of them."""
    blocks = blocks_for(len(tokens), block_size)
    order = list(reversed(runs))
    pieces = [
        forward(run.graph, tokens, run.mode, block_size=block_size, piece=PIECE, first_block=_place(run) * blocks)
        for run in order
    ]
    for begin in range(0, len(tokens), PIECE):
        next_tokens = tokens[begin + 1 : begin + PIECE + 1]
        # one after the other: the logits of a graph are only valid until its next run
        reference = log_softmax(next(pieces[0]))
        order[0].scores.add(reference, reference, next_tokens)
        for run, piece in zip(order[1:], pieces[1:], strict=True):
            run.scores.add(reference, log_softmax(next(piece)), next_tokens)


def _place(run: _Run) -> int:
    """Which share of the cache of its graph a mode uses."""
    return [mode for mode in LADDER if mode in run.graph.modes].index(run.mode)
