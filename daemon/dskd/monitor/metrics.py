"""Figures for Prometheus: some are counted as things happen, the others are read off the models at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dskd.engine.request import BlockScore, NonFinite
from dskd.manager.events import Event
from dskd.manager.types import ManagerSnapshot
from dskd.monitor.states import FallbackState, NoiseMeasure
from dskd.monitor.types import ModeNoise, NoiseSnapshot
from dskquant.version import VERSION

KL_BUCKETS = tuple(float(f"{10 ** (step / 4):.3g}") for step in range(-16, 5))
"""1e-4 to 10 nats, four to a decade."""

RATIO_BUCKETS = tuple(float(f"{10 ** (step / 2):.3g}") for step in range(-16, 3))
"""1e-8 to 10, that is 80 to -10 dB, two to a decade."""

SCRAPE_TIMEOUT_S = 10.0
"""Longest wait for the thread that owns the models."""

OUTCOMES = ("committed", "rejected", "suppressed")

PER_MODEL = ("model",)
PER_MODE = ("model", "mode")


class EventMetrics:
    """What is counted as it happens. Safe from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._kl = Histogram(
            "dskd_kl_nats", "KL(reference || mode) of scored tokens.", PER_MODE, registry=registry, buckets=KL_BUCKETS
        )
        self._ratio = Histogram(
            "dskd_noise_to_signal",
            "Noise power over signal power of scored answers of plain graphs.",
            PER_MODE,
            registry=registry,
            buckets=RATIO_BUCKETS,
        )
        self._scored = _counter(
            registry, "dskd_scored_tokens", "Tokens that the reference scored too; answers, of plain graphs."
        )
        self._agreeing = _counter(
            registry, "dskd_agreeing_tokens", "Scored tokens where the reference has the same most probable one."
        )
        self._non_finite = _counter(
            registry, "dskd_non_finite_steps", "Logits that were not finite and reached nobody."
        )
        self._changes = _counter(registry, "dskd_changes", "Changes of a model.", ("model", "kind", "outcome"))

    def count_score(self, model: str, score: BlockScore) -> None:
        """Counts a scored block. Infinite KL stays out of the histogram: its sum would be lost."""
        labels = (model, score.mode.value)
        kl = (self._kl if score.measure is NoiseMeasure.KL else self._ratio).labels(*labels)
        for value in score.kl[score.kl < float("inf")].tolist():
            kl.observe(value)
        self._scored.labels(*labels).inc(len(score.kl))
        self._agreeing.labels(*labels).inc(int(score.agrees.sum()))

    def count_non_finite(self, model: str, found: NonFinite) -> None:
        self._non_finite.labels(model, found.mode.value).inc()

    async def count_changes(self, events: AsyncIterable[Event]) -> None:
        """Counts the changes among `events`, such as "switch.committed", until cancelled."""
        async for event in events:
            kind, _, outcome = event.kind.rpartition(".")
            if outcome in OUTCOMES:
                self._changes.labels(event.model, kind, outcome).inc()


def _counter(registry: CollectorRegistry, name: str, text: str, labels: tuple[str, ...] = PER_MODE) -> Counter:
    return Counter(name, text, labels, registry=registry)


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """One known model at a moment."""

    name: str
    state: str
    snapshot: ManagerSnapshot | None  # None: not loaded
    noise: NoiseSnapshot | None


class ModelCollector(Collector):
    """Reads the models at each scrape, on the thread that owns them."""

    def __init__(self, read: Callable[[], Iterable[ModelFigures]], loop: asyncio.AbstractEventLoop) -> None:
        """`read` is called on the thread of `loop`."""
        self._read = read
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """All figures. Raises TimeoutError when the owner of the models does not answer."""
        figures = asyncio.run_coroutine_threadsafe(self._figures(), self._loop).result(SCRAPE_TIMEOUT_S)
        loaded = [(model.name, model.snapshot) for model in figures if model.snapshot is not None]
        noises = [(model.name, noise) for model in figures if model.noise for noise in model.noise.modes]
        yield _gauge("dskd_build_info", "Version of the daemon.", ("version",), [((VERSION,), 1)])
        yield _gauge(
            "dskd_model_state",
            "1 for the state that a model is in.",
            ("model", "state"),
            [((model.name, model.state), 1) for model in figures],
        )
        yield from _loop_figures(loaded)
        yield from _mode_figures(loaded)
        yield from _noise_figures(noises)

    async def _figures(self) -> list[ModelFigures]:
        return list(self._read())


Samples = Iterable[tuple[tuple[str, ...], float]]


def _loop_figures(loaded: list[tuple[str, ManagerSnapshot]]) -> Iterator[Metric]:
    loops = [(name, snapshot.loop) for name, snapshot in loaded]
    yield _gauge("dskd_generation", "Generation that serves.", PER_MODEL, [((n,), s.generation) for n, s in loaded])
    yield _gauge("dskd_requests_running", "Requests that run.", PER_MODEL, [((n,), s.running) for n, s in loops])
    yield _gauge("dskd_requests_waiting", "Requests that wait.", PER_MODEL, [((n,), s.waiting) for n, s in loops])
    yield _gauge("dskd_kv_blocks", "Blocks of the KV cache.", PER_MODEL, [((n,), s.blocks_total) for n, s in loops])
    yield _gauge("dskd_kv_blocks_free", "Those not in use.", PER_MODEL, [((n,), s.blocks_free) for n, s in loops])
    yield _count("dskd_steps", "Steps of the loop.", PER_MODEL, [((n,), s.steps) for n, s in loops])


def _mode_figures(loaded: list[tuple[str, ManagerSnapshot]]) -> Iterator[Metric]:
    modes = [((name, state.mode.value), state) for name, snapshot in loaded for state in snapshot.modes]
    serving = [((n, s.mode.value), float(s.mode is snapshot.mode)) for n, snapshot in loaded for s in snapshot.modes]
    yield _gauge("dskd_mode_serving", "1 for the mode of the model.", PER_MODE, serving)
    yield _gauge(
        "dskd_mode_resident_bytes", "Memory that a mode takes.", PER_MODE, [(key, s.bytes) for key, s in modes]
    )
    yield _gauge("dskd_mode_requests", "Open requests in a mode.", PER_MODE, [(key, s.requests) for key, s in modes])
    yield _count("dskd_tokens", "Tokens made.", PER_MODE, [(key, s.tokens) for key, s in modes])


def _noise_figures(noises: list[tuple[str, ModeNoise]]) -> Iterator[Metric]:
    modes = [((name, noise.mode.value), noise) for name, noise in noises]
    states = [((*key, state.value), float(n.state is state)) for key, n in modes for state in FallbackState]
    limits = [(key, n.threshold) for key, n in modes if n.threshold is not None]
    yield _gauge("dskd_fallback_state", "1 for the state that a mode is in.", (*PER_MODE, "state"), states)
    yield _gauge("dskd_kl_threshold_nats", "Mean KL above which a mode falls back.", PER_MODE, limits)
    yield _gauge("dskd_noise_evidence", "Evidence of noise.", PER_MODE, [(key, n.evidence) for key, n in modes])
    yield _gauge(
        "dskd_noise_evidence_needed",
        "Evidence at which a mode falls back.",
        PER_MODE,
        [(key, n.evidence_needed) for key, n in modes],
    )
    yield _count("dskd_fallback_trips", "Times that a mode fell back.", PER_MODE, [(key, n.trips) for key, n in modes])


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _count(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
