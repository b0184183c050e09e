"""The proof gate: no graph serves before it has answered the golden prompts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dskd.config import ProofConfig
from dskd.errors import FailedPreconditionError
from dskquant import golden
from dskquant.divergence import Divergence
from dskquant.engines.protocol import Engine, Graph, Logits, SlotGraph
from dskquant.modes import LADDER, PrecisionMode

Answers = Mapping[PrecisionMode, Logits]
"""To the golden prompts: logits [positions, vocabulary] by mode."""

HARMLESS_KL = 0.02
"""Nats per token below which noise is never much: modes that are nearly exact may differ by any factor."""

HARMLESS_RATIO = 1e-4
"""The same of plain graphs, noise power over signal power: 40 dB."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a mode answered to the golden prompts."""

    mode: PrecisionMode
    divergence: Divergence


def ratio_of_db(sqnr_db: float) -> float:
    """Noise power over signal power."""
    return float(10 ** (-sqnr_db / 10))


def db_of_ratio(ratio: float) -> float:
    """Signal to noise in dB; infinity for no noise at all."""
    return -10 * math.log10(ratio) if ratio > 0 else math.inf


class Prover:
    """Asks graphs the golden prompts and compares their answers with the reference's.

    The reference's answers are in the store. Where they are not (the FP32 graph did not fit when the model was
    converted), the answers of the most exact mode proven so far stand in for them.
    """

    def __init__(self, prompts: golden.Golden, engine: Engine, limits: ProofConfig) -> None:
        self._prompts = prompts.prompts
        self._reference = prompts.reference
        self._stand_in: tuple[PrecisionMode, Logits] | None = None
        self._engine = engine
        self._limits = limits

    @property
    def has_reference(self) -> bool:
        """Whether KL is measured against the reference itself, so that it says how noisy a mode is."""
        return self._reference is not None

    def ask(self, graph: Graph) -> Answers:
        """What `graph` answers in each of its modes; also warms it up. Leaves a scratch cache bound."""
        return {mode: golden.answers(self._prompts, graph, self._engine, mode) for mode in graph.modes}

    def ask_in_slots(self, graph: SlotGraph) -> Answers:
        """`ask` of a slot graph."""
        return {mode: golden.answers_in_slots(self._prompts, graph, mode) for mode in graph.modes}

    def judge(self, answers: Answers, may_stand_in: bool = True) -> list[Proof]:
        """Compares answers with the reference's, the most exact mode first; `may_stand_in` for it, where it is missing.

        Raises FailedPreconditionError, naming the mode and the figures, when one is not finite or too far away.
        """
        return [self._judge(mode, answers[mode], may_stand_in) for mode in reversed(LADDER) if mode in answers]

    def judge_change(self, before: Mapping[PrecisionMode, float], after: Collection[Proof]) -> None:
        """Raises FailedPreconditionError when a mode of a new generation is much noisier than it was before."""
        if not self.has_reference:
            return
        worst = self._limits.max_worsening
        for proof in after:
            mode, kl = proof.mode.value, proof.divergence.mean_kl
            known = before.get(proof.mode)
            if known is not None and kl > max(known * worst, HARMLESS_KL):
                raise FailedPreconditionError(
                    mode,
                    f"{mode} failed its proof: on the golden prompts its mean KL to the reference is {kl:.3g} nats, "
                    f"that of the serving generation {known:.3g} (limit: {worst:g} times that)",
                )

    def _judge(self, mode: PrecisionMode, logits: Logits, may_stand_in: bool) -> Proof:
        proof = Proof(mode, Divergence.between(self._reference_for(logits), logits))
        self._require_limits(proof)
        if may_stand_in:
            self._offer_stand_in(mode, logits)
        return proof

    def _reference_for(self, logits: Logits) -> Logits:
        if self._reference is not None:
            return self._reference
        return self._stand_in[1] if self._stand_in else logits

    def _offer_stand_in(self, mode: PrecisionMode, proven: Logits) -> None:
        if self._stand_in is None or LADDER.index(mode) >= LADDER.index(self._stand_in[0]):
            self._stand_in = mode, proven

    def _require_limits(self, proof: Proof) -> None:
        mode, figures = proof.mode.value, proof.divergence
        if not figures.finite:
            raise FailedPreconditionError(mode, f"{mode} failed its proof: an answer to a golden prompt is not finite")
        limits = self._limits  # NaN is within none
        if not (figures.mean_kl <= limits.max_kl and figures.agreement >= limits.min_agreement):
            raise FailedPreconditionError(
                mode,
                f"{mode} failed its proof: on the golden prompts its mean KL to the reference is {figures.mean_kl:.3g} "
                f"nats (limit {limits.max_kl:g}) and its top-1 agreement {figures.agreement:.0%} "
                f"(at least {limits.min_agreement:.0%})",
            )
