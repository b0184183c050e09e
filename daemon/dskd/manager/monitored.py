"""A model as its noise monitor sees it."""

from __future__ import annotations

import asyncio

from dskd.engine.request import ModeRules, ScoringPlan
from dskd.manager.journal import Journal
from dskd.manager.parts import ModelLoop
from dskd.manager.residency import Residency
from dskd.manager.transitions import Serving, Transitions
from dskd.manager.types import HistoryEntry
from dskd.monitor.types import Served
from dskquant.modes import REFERENCE, PrecisionMode

PROOF_MARGIN = 2.0
"""The golden prompts are few and of their own kind: live text may be this much noisier with nothing being wrong."""


class ManagedModel:
    """Implements `dskd.monitor.types.MonitoredModel`."""

    def __init__(
        self,
        transitions: Transitions,
        residency: Residency,
        loop: ModelLoop,
        journal: Journal,
        proofs_are_absolute: bool,
    ) -> None:
        """`proofs_are_absolute`: the graphs were proven against the reference, and not against a stand-in for it."""
        self._transitions = transitions
        self._residency = residency
        self._loop = loop
        self._journal = journal
        self._proofs_are_absolute = proofs_are_absolute

    def served(self) -> Served:
        now = self._transitions.serving
        return Served(
            now.generation.number,
            now.mode,
            now.pinned,
            self._expected_kl(now),
            self._residency.modes_in_memory(now.generation),
            self._loop.snapshot(),
        )

    def _expected_kl(self, now: Serving) -> dict[PrecisionMode, float]:
        """Of the noisier engine: a calibration measures on the first one alone."""
        calibrated = now.generation.parameters.expected_kl
        times = {mode: self._residency.second_noise(now.generation, mode) for mode in calibrated}
        return self._proven_kl(now) | {mode: times[mode] * kl for mode, kl in calibrated.items()}

    def _proven_kl(self, now: Serving) -> dict[PrecisionMode, float]:
        if not self._proofs_are_absolute:
            return {}
        proofs = self._residency.proofs(now.generation)
        kl = now.kept[0].kl | {mode: proof.divergence.mean_kl for mode, proof in proofs.items()}
        return {mode: PROOF_MARGIN * value for mode, value in kl.items() if mode is not REFERENCE}

    async def make_ready(self, mode: PrecisionMode) -> None:
        self._residency.want(mode)
        await self._transitions.settled()
        await self._residency.ensure(self._transitions.serving.generation, mode)

    def let_go(self, mode: PrecisionMode) -> None:
        self._residency.want_no_longer(mode)

    async def set_rules(self, rules: ModeRules, repair: bool) -> None:
        await asyncio.wrap_future(self._loop.set_rules(rules, repair))

    async def set_scoring(self, plan: ScoringPlan | None) -> None:
        await asyncio.wrap_future(self._loop.set_scoring(plan))

    async def escalate(self, request_id: str, mode: PrecisionMode, repair: bool) -> bool:
        return await asyncio.wrap_future(self._loop.escalate(request_id, mode, repair))

    def note(self, entry: HistoryEntry) -> None:
        self._journal.note(entry)
