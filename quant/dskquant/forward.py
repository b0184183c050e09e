"""Runs a text through a graph outside of any serving: one sequence, in pieces, from an empty cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dskquant.engines.protocol import Graph, Logits, StepBatch
from dskquant.modes import PrecisionMode


def forward(
    graph: Graph, tokens: Sequence[int], mode: PrecisionMode, *, block_size: int, piece: int = 256, wanted_from: int = 0
) -> Iterator[Logits]:
    """Logits of the positions from `wanted_from` on, [n, vocabulary] for each piece of at most `piece` tokens.

    Uses the first blocks of the cache bound to `graph`. Each array is only valid until the next is asked for.
    """
    for begin in range(0, len(tokens), piece):
        end = min(begin + piece, len(tokens))
        if end > wanted_from:
            yield graph.run(_piece_of(tokens, begin, end, max(begin, wanted_from), mode, block_size))
        else:
            graph.run(_piece_of(tokens, begin, end, end - 1, mode, block_size))


def blocks_for(tokens: int, block_size: int) -> int:
    """Cache blocks that hold `tokens` tokens of one sequence."""
    return -(-tokens // block_size)


def _piece_of(
    tokens: Sequence[int], begin: int, end: int, wanted_from: int, mode: PrecisionMode, block_size: int
) -> StepBatch:
    rows = np.arange(end - begin, dtype=np.int32)
    blocks = blocks_for(end, block_size)
    return StepBatch(
        token_ids=np.array(tokens[begin:end], np.int64),
        positions=np.arange(begin, end, dtype=np.int64),
        past_lens=np.array([begin], np.int32),
        subsequence_begins=np.array([0, end - begin], np.int32),
        block_indices=np.arange(blocks, dtype=np.int32),
        block_indices_begins=np.array([0, blocks], np.int32),
        residual_rows=rows if mode is PrecisionMode.INT8 else rows[:0],
        logit_rows=rows[wanted_from - begin :],
    )
