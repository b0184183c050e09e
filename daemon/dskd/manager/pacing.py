"""Runs graphs that are not serving yet so that those who are served hardly notice."""

from __future__ import annotations

from dskd.engine.step_loop import StepLoop
from dskquant.engines.protocol import Graph, Logits, StepBatch

BUSY_PIECE = 1
IDLE_PIECE = 16


class BetweenSteps:
    """Runs on the thread of a step loop, one run between two steps, in small pieces while it has requests.

    Two runs at a time on all cores hold each other up by more than their sum: the threads of both wait for the last of
    their own. And a token of each text takes less time than a step.
    """

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop

    @property
    def piece(self) -> int:
        return BUSY_PIECE if self._loop.snapshot().requests_by_mode else IDLE_PIECE

    def run(self, graph: Graph, batch: StepBatch) -> Logits:
        """Blocks until it is done. Raises UnavailableError when the loop has stopped."""
        return self._loop.between_steps(lambda: graph.run(batch)).result()
