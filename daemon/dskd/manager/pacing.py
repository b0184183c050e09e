"""Runs graphs that are not serving yet so that those who are served hardly notice."""

from __future__ import annotations

import time

from dskd.engine.step_loop import StepLoop
from dskquant.engines.protocol import Graph, Logits, StepBatch

FIRST_PIECE = 8
LARGEST_PIECE = 64
"""Tokens of each text."""

LONGEST_PAUSE_S = 0.25
"""Of the steps, for one run."""


class BetweenSteps:
    """Runs on the thread of a step loop, one run between two steps.

    Two runs at a time on all cores hold each other up by more than their sum: the threads of both wait for the last of
    their own. Few pauses that are short enough to be overlooked are better than many steps that each take longer: even
    a single token costs most of what a step costs.
    """

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._piece = FIRST_PIECE

    @property
    def piece(self) -> int:
        return self._piece

    def run(self, graph: Graph, batch: StepBatch) -> Logits:
        """Blocks until it is done. Raises UnavailableError when the loop has stopped."""
        return self._loop.between_steps(lambda: self._timed_run(graph, batch)).result()

    def _timed_run(self, graph: Graph, batch: StepBatch) -> Logits:
        began = time.perf_counter()
        logits = graph.run(batch)
        spent = time.perf_counter() - began
        read = batch.token_ids.size / len(batch.past_lens)  # of each text
        self._piece = max(1, min(int(read * LONGEST_PAUSE_S / spent), LARGEST_PIECE))
        return logits
