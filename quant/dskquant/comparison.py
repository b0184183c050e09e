"""Measures how far each mode is from the reference on a text: perplexity, divergence, agreement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dskquant.divergence import Float64, kl_divergence, log_softmax
from dskquant.engines.protocol import CompileOptions, Engine, Graph, Logits, graph_key
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

    def add(self, reference: Logits, served: Logits, next_tokens: Sequence[int]) -> None:
        """Scores positions [n, vocabulary]; the last one of a window has no next token."""
        log_probabilities = log_softmax(served)
        self.kl.append(kl_divergence(log_softmax(reference), log_probabilities))
        self.same += (reference.argmax(axis=1) == served.argmax(axis=1)).tolist()
        rows = np.arange(len(next_tokens))
        self.negative_log_likelihood += (-log_probabilities[rows, list(next_tokens)]).tolist()

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

    Takes the memory of the reference's graph, of the compared ones, and of the logits of one window.
    """
    ordered = [mode for mode in LADDER if mode in modes or mode is REFERENCE]
    scores = {mode: _Scores() for mode in ordered}
    windows = [tokens[begin : begin + window] for begin in range(0, len(tokens), window)]
    with ExitStack() as stack:
        graphs: dict[frozenset[PrecisionMode], Graph] = {}
        for key in dict.fromkeys(graph_key(mode) for mode in ordered):
            graphs[key] = stack.enter_context(_compiled(store, engine, key, options, window))
        for done, its_tokens in enumerate(windows):
            progress(done, len(windows))
            reference = np.concatenate(list(_copies(graphs[graph_key(REFERENCE)], its_tokens, REFERENCE, engine)))
            for mode in ordered:
                _score_window(scores[mode], reference, graphs[graph_key(mode)], its_tokens, mode, engine)
        progress(len(windows), len(windows))
    return [scores[mode].quality(mode) for mode in ordered]


@contextmanager
def _compiled(
    store: Path, engine: Engine, modes: frozenset[PrecisionMode], options: CompileOptions, window: int
) -> Iterator[Graph]:
    """A graph with a cache for one window, closed at the end."""
    graph = engine.compile(store, modes, options)
    try:
        graph.bind(graph.allocate_cache(blocks_for(window, engine.block_size)))
        yield graph
    finally:
        graph.close()


def _copies(graph: Graph, tokens: Sequence[int], mode: PrecisionMode, engine: Engine) -> Iterator[Logits]:
    return (logits.copy() for logits in forward(graph, tokens, mode, block_size=engine.block_size, piece=PIECE))


def _score_window(
    scores: _Scores, reference: Logits, graph: Graph, tokens: Sequence[int], mode: PrecisionMode, engine: Engine
) -> None:
    begin = 0
    for served in forward(graph, tokens, mode, block_size=engine.block_size, piece=PIECE):
        end = begin + len(served)
        scores.add(reference[begin:end], served, tokens[begin + 1 : end + 1])
        begin = end
