"""When escalated requests take part in a step: as often as the others can afford.

A float mode has a graph of its own, whose run comes on top of the step of the others, and a row of INT8 costs the rows
of INT4 beside it a second pass. So that one hard answer does not slow all others down, what a step took longer because
of escalated requests is a debt, and they wait until the steps of the others have paid it back at the agreed share.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from dskd.engine.sequence import Chunk, Sequence

LONGEST_PAUSE_S = 1.0
"""Of steps in which no escalated request took part: an answer that crawls is better than one that stands."""

MEMORY = 0.9
"""Of the usual duration of a step: ten steps, about."""


class EscalationPace:
    """Plain arithmetic on the durations of steps; nothing here reads a clock."""

    def __init__(self) -> None:
        self._usual_s = 0.0  # a step of decodes in which nobody escalated takes part
        self._debt_s = 0.0  # what steps took longer and is not paid back yet; below 0: room for chance
        self._rate = 0.0  # of the time of the others: what pays it back
        self._paused_s = 0.0

    def held(self, running: Many[Sequence], share: float) -> frozenset[Sequence]:
        """Those of `running` that sit out the next step.

        `share`: of the time of the others that each escalated request may take.
        """
        escalated = frozenset(sequence for sequence in running if sequence.is_escalated)
        self._rate = share * len(escalated)
        is_free = len(escalated) == len(running) or share >= 1
        is_due = self._debt_s <= 0 or self._paused_s >= LONGEST_PAUSE_S
        return frozenset() if is_free or is_due else escalated

    def note(self, chunks: Many[Chunk], took_s: float) -> None:
        """Takes in a step: `chunks` have run for `took_s` seconds."""
        escalated = any(chunk.sequence.is_escalated for chunk in chunks)
        others_read = any(chunk.num_tokens > 1 and not chunk.sequence.is_escalated for chunk in chunks)
        self._paused_s = 0.0 if escalated else self._paused_s + took_s
        if not escalated:
            self._pay(took_s)
        elif not others_read:  # else nobody knows what took how long
            self._debt_s += took_s - self._usual_s
            self._pay(self._usual_s)
        if not (escalated or others_read):
            self._usual_s = MEMORY * self._usual_s + (1 - MEMORY) * took_s if self._usual_s else took_s

    def _pay(self, others_s: float) -> None:
        """The others have had `others_s` seconds. Neither debts nor savings outlast what a pause can pay."""
        self._debt_s = max(-self._usual_s, min(self._debt_s - others_s * self._rate, LONGEST_PAUSE_S * self._rate))
