"""What was served in one cache block of a sequence, kept until another mode has computed it too."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from dskd.engine.sequence import Sequence
from dskquant.engines.protocol import Int32, Int64, Logits, StepBatch
from dskquant.modes import PrecisionMode


class Pair(NamedTuple):
    """Two modes that are compared: one has served, the other computes the same positions again."""

    served: PrecisionMode
    again: PrecisionMode
    is_probe: bool  # the one that served is the reference


class Recording:
    """The served logits of consecutive positions of one sequence, all made by one generation and mode."""

    def __init__(self, sequence: Sequence, position: int, pair: Pair) -> None:
        self.sequence = sequence
        self.pair = pair
        self.generation = sequence.generation
        self.first = position
        self.rows: list[Logits] = []
        self.made: list[float] = []  # seconds of `time.monotonic`

    def continues_at(self, position: int, sequence: Sequence) -> bool:
        """Whether the row of `position` belongs to it."""
        same_label = (self.generation, self.pair.served) == sequence.served_by
        return same_label and position == self.first + len(self.rows)

    def add(self, row: Logits) -> None:
        """Copies `row` [vocabulary]: the array is the graph's."""
        self.rows.append(row.copy())
        self.made.append(time.monotonic())


class Job(NamedTuple):
    """Positions to be computed again: `tokens` from position `start` on, of which the last n were recorded."""

    request_id: str
    generation: int
    pair: Pair
    start: int  # begins a cache block
    tokens: Int64
    past: Int32  # the blocks of all tokens before `start`, held for it
    served: Logits  # [n, vocabulary]
    served_tokens: Int64  # [n] drawn from those
    made: list[float]

    @property
    def num_served(self) -> int:
        return len(self.served_tokens)

    def batch(self, scratch: Int32) -> StepBatch:
        """The step that computes it; keys and values go into the blocks `scratch`."""
        total, blocks = len(self.tokens), np.concatenate((self.past, scratch))
        rows = np.arange(total, dtype=np.int32)
        return StepBatch(
            token_ids=self.tokens,
            positions=np.arange(self.start, self.start + total, dtype=np.int64),
            past_lens=np.array([self.start], np.int32),
            subsequence_begins=np.array([0, total], np.int32),
            block_indices=blocks,
            block_indices_begins=np.array([0, len(blocks)], np.int32),
            residual_rows=rows if self.pair.again is PrecisionMode.INT8 else rows[:0],
            logit_rows=rows[total - self.num_served :],
        )


def as_job(recording: Recording, start: int, past: Int32) -> Job:
    """The job that computes what was recorded again, from position `start` on."""
    tokens, end = recording.sequence.tokens, recording.first + len(recording.rows)
    return Job(
        recording.sequence.request.request_id,
        recording.generation,
        recording.pair,
        start,
        np.array(tokens[start:end], np.int64),
        past,
        np.array(recording.rows),
        np.array(tokens[recording.first + 1 : end + 1], np.int64),
        recording.made,
    )
