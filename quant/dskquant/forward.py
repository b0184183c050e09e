"""Runs a text through a graph outside of any serving: one sequence, in pieces, from an empty cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dskquant.engines.protocol import Graph, Logits, StepBatch
from dskquant.modes import PrecisionMode


def forward(
    graph: Graph,
    tokens: Sequence[int],
    mode: PrecisionMode,
    *,
    block_size: int,
    piece: int = 256,
    wanted_from: int = 0,
    first_block: int = 0,
) -> Iterator[Logits]:
    """Logits of the positions from `wanted_from` on, [n, vocabulary] for each piece of at most `piece` tokens.

    Uses the blocks from `first_block` on of the cache bound to `graph`. Each array is only valid until the next one is
    asked for.
    """
    for begin in range(0, len(tokens), piece):
        end = min(begin + piece, len(tokens))
        logit_rows = range(max(begin, wanted_from), end) or range(end - 1, end)
        blocks = range(first_block, first_block + blocks_for(end, block_size))
        logits = graph.run(_piece_of(tokens, begin, end, logit_rows, mode, blocks))
        if end > wanted_from:
            yield logits


def blocks_for(tokens: int, block_size: int) -> int:
    """Cache blocks that hold `tokens` tokens of one sequence."""
    return -(-tokens // block_size)


def _piece_of(
    tokens: Sequence[int], begin: int, end: int, logit_rows: range, mode: PrecisionMode, blocks: range
) -> StepBatch:
    rows = np.arange(end - begin, dtype=np.int32)
    return StepBatch(
        token_ids=np.array(tokens[begin:end], np.int64),
        positions=np.arange(begin, end, dtype=np.int64),
        past_lens=np.array([begin], np.int32),
        subsequence_begins=np.array([0, end - begin], np.int32),
        block_indices=np.array(blocks, np.int32),
        block_indices_begins=np.array([0, len(blocks)], np.int32),
        residual_rows=rows if mode is PrecisionMode.INT8 else rows[:0],
        logit_rows=np.array(logit_rows, np.int32) - np.int32(begin),
    )
