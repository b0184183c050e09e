"""Lays the chunks of one graph's step end to end in one `StepBatch`, or side by side in one `SlotBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from dskd.engine.sequence import Chunk
from dskquant.engines.protocol import Int32, Int64, SlotBatch, StepBatch
from dskquant.modes import PrecisionMode


def build_batch(chunks: Sequence[Chunk], block_size: int) -> StepBatch:
    """The batch that runs `chunks` (at least one; all served by one graph, in modes that may differ)."""
    lengths = np.array([chunk.num_tokens for chunk in chunks], np.int32)
    past_lens = np.array([chunk.sequence.num_cached for chunk in chunks], np.int32)
    begins = offsets(lengths)
    # A table may reach beyond the chunk: the blocks of a prompt are taken all at once.
    tables = [
        sequence.blocks[: -(-(sequence.num_cached + num_tokens) // block_size)] for sequence, num_tokens in chunks
    ]
    in_int8 = np.array([chunk.sequence.mode is PrecisionMode.INT8 for chunk in chunks])
    wants_logits = np.array([chunk.wants_logits for chunk in chunks])
    return StepBatch(
        token_ids=np.array(new_tokens(chunks), np.int64),
        positions=np.arange(begins[-1]) + np.repeat(past_lens - begins[:-1], lengths),
        past_lens=past_lens,
        subsequence_begins=begins,
        block_indices=np.concatenate(tables),
        block_indices_begins=offsets(np.array([len(table) for table in tables], np.int32)),
        residual_rows=np.flatnonzero(np.repeat(in_int8, lengths)).astype(np.int32),
        logit_rows=begins[1:][wants_logits] - np.int32(1),
    )


def build_slot_batch(decodes: Sequence[Chunk], slots: Sequence[int], first_slot: int) -> SlotBatch:
    """The batch that runs `decodes`, one token each, whose sequences fill the neighbouring `slots`, in any order."""
    # Between two runs of an engine the caches of the CPU hold weights: what is done there costs what it touches, so
    # lists are sorted here and numpy sees each array once.
    rows = [slot - first_slot for slot in slots]
    by_row = sorted(zip(rows, decodes, new_tokens(decodes), strict=True), key=itemgetter(0))
    return SlotBatch(
        first_slot=first_slot,
        token_ids=np.array([[token] for _, _, token in by_row], np.int64),
        past_lens=np.array([chunk.sequence.num_cached for _, chunk, _ in by_row], np.int32),
        new_lens=np.array([1] * len(rows), np.int32),
        residual_rows=_first_tokens(
            [row for row, chunk in zip(rows, decodes, strict=True) if chunk.sequence.mode is PrecisionMode.INT8]
        ),
        logit_rows=_first_tokens(rows),
    )


def _first_tokens(rows: Sequence[int]) -> Int64:
    """Where the first tokens of `rows` are in a batch [n, 2]."""
    return np.array([(row, 0) for row in rows], np.int64).reshape(-1, 2)


def new_tokens(chunks: Sequence[Chunk]) -> list[int]:
    """The tokens that go through the graph, of all chunks end to end."""
    tokens: list[int] = []
    for sequence, num_tokens in chunks:
        tokens += sequence.tokens[sequence.num_cached : sequence.num_cached + num_tokens]
    return tokens


def offsets(lengths: Int32) -> Int32:
    """Where each of B pieces laid end to end begins, and where the last one ends [B + 1]."""
    result = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=result[1:])
    return result
