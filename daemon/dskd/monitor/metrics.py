"""Figures for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from dskd.engine.request import BlockScore

KL_BUCKETS = tuple(float(f"{10 ** (step / 4):.3g}") for step in range(-16, 5))
"""1e-4 to 10 nats, four to a decade."""


class NoiseMetrics:
    """What monitors count as it happens. Safe from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("model", "mode")
        self._kl = Histogram(
            "dskd_kl_nats", "KL(reference || mode) of scored tokens.", labels, registry=registry, buckets=KL_BUCKETS
        )
        self._scored = Counter("dskd_scored_tokens", "Tokens scored by the reference.", labels, registry=registry)
        self._agreeing = Counter(
            "dskd_agreeing_tokens",
            "Scored tokens where the reference has the same most probable one.",
            labels,
            registry=registry,
        )

    def count(self, model: str, score: BlockScore) -> None:
        """Counts a scored block; a KL that is infinite is left out of the histogram, whose sum would be lost."""
        labels = (model, score.mode.value)
        kl = self._kl.labels(*labels)
        for value in score.kl[score.kl < float("inf")].tolist():
            kl.observe(value)
        self._scored.labels(*labels).inc(len(score.kl))
        self._agreeing.labels(*labels).inc(int(score.agrees.sum()))
