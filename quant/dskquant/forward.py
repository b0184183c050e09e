"""Runs texts through a graph outside of any serving, in pieces, from an empty cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dskquant.engines.protocol import Graph, Logits, SlotBatch, StepBatch
from dskquant.modes import PrecisionMode


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one text, some of whose logits are wanted."""

    text: Sequence[int]
    begin: int
    end: int
    wanted_from: int
    first_block: int

    @property
    def wanted(self) -> range:
        """The positions in the text whose logits are wanted."""
        return range(max(self.begin, self.wanted_from), self.end)


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
        chunk = Chunk(tokens, begin, min(begin + piece, len(tokens)), wanted_from, first_block)
        logits = graph.run(batch_of([chunk], mode, block_size))
        if chunk.wanted:
            yield logits


def forward_together(
    graph: Graph,
    texts: Sequence[Sequence[int]],
    mode: PrecisionMode,
    *,
    block_size: int,
    last: int,
    piece: int = 256,
) -> list[Logits]:
    """Logits [n, vocabulary] of the `last` positions of each text, all read side by side, `piece` tokens of each a run.

    Uses `blocks_for(longest text)` blocks for each text, from the first block on of the cache bound to `graph`.
    """
    found: list[list[Logits]] = [[] for _ in texts]
    longest = max(map(len, texts))
    for begin in range(0, longest, piece):
        end = begin + piece
        chunks = {
            index: Chunk(text, begin, min(end, len(text)), len(text) - last, index * blocks_for(longest, block_size))
            for index, text in enumerate(texts)
            if begin < len(text)
        }
        logits = graph.run(batch_of(list(chunks.values()), mode, block_size))
        row = 0
        for index, chunk in chunks.items():
            found[index].append(logits[row : row + len(chunk.wanted)].copy())
            row += len(chunk.wanted)
    return [np.concatenate(pieces) for pieces in found]


def slot_batch_of(
    texts: Sequence[Sequence[int]], begin: int, end: int, wanted: Sequence[range], mode: PrecisionMode
) -> SlotBatch:
    """One run that reads the tokens `begin` to `end` of each text that is so long, for logits of `wanted`."""
    lengths = np.array([len(text) for text in texts], np.int32)
    token_ids = np.zeros((len(texts), end - begin), np.int64)
    for row, text in enumerate(texts):
        token_ids[row, : max(len(text) - begin, 0)] = text[begin:end]
    past_lens = np.minimum(lengths, np.int32(begin))
    new_lens = np.minimum(lengths, np.int32(end)) - past_lens
    rows = np.argwhere(np.arange(end - begin) < new_lens[:, None])
    positions = [(row, position - begin) for row, found in enumerate(wanted) for position in found]
    return SlotBatch(
        first_slot=0,
        token_ids=token_ids,
        past_lens=past_lens,
        new_lens=new_lens,
        residual_rows=rows if mode is PrecisionMode.INT8 else rows[:0],
        logit_rows=np.array(positions, np.int64),
    )


def blocks_for(tokens: int, block_size: int) -> int:
    """Cache blocks that hold `tokens` tokens of one sequence."""
    return -(-tokens // block_size)


def batch_of(chunks: Sequence[Chunk], mode: PrecisionMode, block_size: int) -> StepBatch:
    """One run that reads `chunks`, whose texts have been read up to there; at least one position has logits."""
    begins = np.cumsum([0, *(chunk.end - chunk.begin for chunk in chunks)], dtype=np.int32)
    tables = [chunk.first_block + np.arange(blocks_for(chunk.end, block_size), dtype=np.int32) for chunk in chunks]
    offsets = [begin - chunk.begin for begin, chunk in zip(begins.tolist(), chunks, strict=False)]
    wanted = [position + offset for chunk, offset in zip(chunks, offsets, strict=True) for position in chunk.wanted]
    rows = np.arange(begins[-1], dtype=np.int32)
    return StepBatch(
        token_ids=np.concatenate([np.array(chunk.text[chunk.begin : chunk.end], np.int64) for chunk in chunks]),
        positions=np.concatenate([np.arange(chunk.begin, chunk.end, dtype=np.int64) for chunk in chunks]),
        past_lens=np.array([chunk.begin for chunk in chunks], np.int32),
        subsequence_begins=begins,
        block_indices=np.concatenate(tables),
        block_indices_begins=np.cumsum([0, *map(len, tables)], dtype=np.int32),
        residual_rows=rows if mode is PrecisionMode.INT8 else rows[:0],
        logit_rows=np.array(wanted, np.int32) if wanted else rows[-1:],
    )
