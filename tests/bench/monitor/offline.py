"""What modes compute outside of any serving, for the same tokens: the other side of a comparison with live figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from dskquant import parameter_set
from dskquant.divergence import Float64, kl_divergence, log_softmax
from dskquant.engines import load_engine
from dskquant.engines.protocol import CompileOptions, Graph, Logits, StepBatch, graph_key
from dskquant.forward import blocks_for
from dskquant.modes import LADDER, REFERENCE, PrecisionMode

PIECE = 128


class Offline:
    """Graphs over one cache; each mode has a place of its own in it for one sequence of `longest` tokens."""

    def __init__(self, graphs: dict[PrecisionMode, Graph], block_size: int, longest: int) -> None:
        self._graphs = graphs
        self._block_size = block_size
        self._blocks = blocks_for(longest, block_size)

    def run(self, tokens: Sequence[int], begin: int, end: int, mode: PrecisionMode, place: int | None = None) -> Logits:
        """Reads `tokens[begin:end]`, those before being in the cache; the logits [end - begin, V] of all, copied.

        `place` is which sequence of the cache it is; by default each mode has its own.
        """
        first = (LADDER.index(mode) if place is None else place) * self._blocks
        logits = self._graphs[mode].run(_batch(tokens, begin, end, mode, range(first, first + self._blocks)))
        return logits.copy()

    def log_probabilities(self, tokens: Sequence[int], mode: PrecisionMode, wanted_from: int) -> Iterator[Float64]:
        """Of the positions from `wanted_from` on, piece by piece, from an empty cache."""
        for begin in range(0, len(tokens), PIECE):
            logits = self.run(tokens, begin, min(begin + PIECE, len(tokens)), mode)
            wanted = logits[max(wanted_from - begin, 0) :]
            if len(wanted):
                yield log_softmax(wanted)

    def kl(self, tokens: Sequence[int], mode: PrecisionMode, wanted_from: int) -> Float64:
        """KL(FP32 || mode) in nats at the positions from `wanted_from` on, each mode with a context of its own."""
        pieces = zip(
            self.log_probabilities(tokens, REFERENCE, wanted_from),
            self.log_probabilities(tokens, mode, wanted_from),
            strict=True,
        )
        return np.concatenate([kl_divergence(reference, served) for reference, served in pieces])

    def kl_of(self, tokens: Sequence[int], positions: Sequence[int], served: Sequence[Logits]) -> Float64:
        """KL(FP32 || served) in nats of logits that were seen at `positions`."""
        reference = np.concatenate(list(self.log_probabilities(tokens, REFERENCE, 0)))
        return kl_divergence(reference[list(positions)], log_softmax(np.array(served)))


@contextmanager
def offline(
    store: Path, modes: Sequence[PrecisionMode], longest: int, parameters: Path | None = None, places: int = len(LADDER)
) -> Iterator[Offline]:
    """Graphs of `modes` and of FP32, with `parameters` (None: the default set of `store`)."""
    engine, options = load_engine("openvino"), CompileOptions()
    chosen = parameter_set.read(parameters) if parameters else None
    with ExitStack() as stack:
        graphs: dict[PrecisionMode, Graph] = {}
        for key in {graph_key(mode) for mode in (*modes, REFERENCE)}:
            graph = engine.compile(store, key, options, None if REFERENCE in key else chosen)
            stack.callback(graph.close)
            graphs |= dict.fromkeys(key, graph)
        cache = graphs[REFERENCE].allocate_cache(places * blocks_for(longest, engine.block_size))
        for graph in set(graphs.values()):
            graph.bind(cache)
        yield Offline(graphs, engine.block_size, longest)


def _batch(tokens: Sequence[int], begin: int, end: int, mode: PrecisionMode, blocks: range) -> StepBatch:
    rows = np.arange(end - begin, dtype=np.int32)
    return StepBatch(
        token_ids=np.array(tokens[begin:end], np.int64),
        positions=np.arange(begin, end, dtype=np.int64),
        past_lens=np.array([begin], np.int32),
        subsequence_begins=np.array([0, end - begin], np.int32),
        block_indices=np.array(blocks, np.int32),
        block_indices_begins=np.array([0, len(blocks)], np.int32),
        residual_rows=rows if mode is PrecisionMode.INT8 else rows[:0],
        logit_rows=rows,
    )
