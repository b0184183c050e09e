"""Measures how far modes and parameter sets are from the reference on a text: perplexity, divergence, agreement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dskquant import parameter_set
from dskquant.bits import mean_bits
from dskquant.divergence import Float64, kl_divergence, log_softmax
from dskquant.engines.protocol import CompileOptions, Engine, Graph
from dskquant.errors import QuantError
from dskquant.forward import blocks_for, forward
from dskquant.modes import LADDER, QUANTIZED, REFERENCE, PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.store import DEFAULT_PARAMETER_SET, TOKENIZER, StoreManifest

PIECE = 128
"""Positions scored at once: bounds the memory of their distributions in float64."""


FLOAT_BITS = {PrecisionMode.FP16: 16.0, PrecisionMode.FP32: 32.0}


class NamedSet(NamedTuple):
    """A parameter set, its codes stored, and what to call it."""

    name: str
    parameters: ParameterSet


@dataclass(frozen=True, slots=True)
class ModeQuality:
    """One mode on a text."""

    parameter_set: str | None  # its name; None: the mode needs none
    mode: PrecisionMode
    bits_per_weight: float  # of the whole model, scales and what is not quantized included
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

    def quality(self, name: str | None, mode: PrecisionMode, bits_per_weight: float) -> ModeQuality:
        kl = np.concatenate(self.kl)
        return ModeQuality(
            name,
            mode,
            bits_per_weight,
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
    sets: Sequence[NamedSet] = (),
    window: int = 512,
    progress: Callable[[int, int], None],
) -> list[ModeQuality]:
    """Runs every mode and the reference over `tokens`, cut into windows that each start from an empty cache.

    INT4 and INT8 are run with the default set of the store and with each of `sets`. One run of the reference serves
    all. Takes the memory of the reference's graph and of all compared ones.
    """
    default = NamedSet(DEFAULT_PARAMETER_SET.name, parameter_set.read(store / DEFAULT_PARAMETER_SET))
    windows = [tokens[begin : begin + window] for begin in range(0, len(tokens), window)]
    with ExitStack() as stack:
        runs = _compile_runs(store, engine, _measured(modes, [default, *sets]), options, window, stack)
        for done, its_tokens in enumerate(windows):
            progress(done, len(windows))
            _score_window(runs, its_tokens, engine.block_size)
        progress(len(windows), len(windows))
    manifest = StoreManifest.read(store)
    return [_quality(run, manifest) for run in runs]


class _Measured(NamedTuple):
    """A mode, and the set it computes with."""

    mode: PrecisionMode
    named: NamedSet | None


class _Run(NamedTuple):
    graph: Graph
    measured: _Measured
    scores: _Scores


def _measured(modes: Collection[PrecisionMode], sets: Sequence[NamedSet]) -> list[_Measured]:
    """What is measured, the reference last."""
    ordered = [mode for mode in LADDER if mode in modes or mode is REFERENCE]
    quantized = [_Measured(mode, named) for named in sets for mode in ordered if mode in QUANTIZED]
    return quantized + [_Measured(mode, None) for mode in ordered if mode not in QUANTIZED]


def _compile_runs(
    store: Path,
    engine: Engine,
    measured: Sequence[_Measured],
    options: CompileOptions,
    window: int,
    stack: ExitStack,
) -> list[_Run]:
    """One graph for all modes that can share it, closed with `stack`."""
    graphs: dict[tuple[frozenset[PrecisionMode], int], Graph] = {}
    runs = []
    for each in measured:
        modes, parameters = options.graph_key(each.mode), each.named.parameters if each.named else None
        key = modes, id(parameters)
        if key not in graphs:
            graphs[key] = stack.enter_context(_compiled(store, engine, modes, options, parameters, window))
        runs.append(_Run(graphs[key], each, _Scores()))
    return runs


def _quality(run: _Run, store: StoreManifest) -> ModeQuality:
    mode, named = run.measured
    if named is None:
        return run.scores.quality(None, mode, FLOAT_BITS[mode])
    bits = mean_bits(named.parameters.tensors.values(), store)
    return run.scores.quality(named.name, mode, bits.int4 if mode is PrecisionMode.INT4 else bits.int8)


@contextmanager
def _compiled(
    store: Path,
    engine: Engine,
    modes: frozenset[PrecisionMode],
    options: CompileOptions,
    parameters: ParameterSet | None,
    window: int,
) -> Iterator[Graph]:
    """A graph with a cache for one window in each of its modes, closed at the end."""
    graph = engine.compile(store, modes, options, parameters)
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
        forward(
            run.graph, tokens, run.measured.mode, block_size=block_size, piece=PIECE, first_block=_place(run) * blocks
        )
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
    return [mode for mode in LADDER if mode in run.graph.modes].index(run.measured.mode)
