"""Metrics: what Prometheus reads over HTTP is what the models say and what was counted."""

from __future__ import annotations

import asyncio
import math
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dskd.address import Address
from dskd.engine.request import BlockScore, LoopSnapshot, NonFinite
from dskd.listen import StartupError
from dskd.manager.events import Event
from dskd.manager.types import ManagerSnapshot, ModeState
from dskd.monitor.metrics import KL_BUCKETS, EventMetrics, ModelCollector, ModelFigures
from dskd.monitor.metrics_server import MetricsServer
from dskd.monitor.states import FallbackState
from dskd.monitor.types import ModeNoise, NoiseSnapshot
from dskd.monitor.window import NoiseWindow
from dskquant.modes import PrecisionMode
from dskquant.version import VERSION

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
ANY_PORT = Address(host="127.0.0.1", port=0)

Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(address: Address) -> Scrape:
    """All samples by name and labels, fetched over a real socket and read by Prometheus' own parser."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted(labels.items()))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def address(registry: CollectorRegistry) -> Iterator[Address]:
    server = MetricsServer(ANY_PORT, registry)
    yield server.start()
    server.stop()


def score(*kl: float, agrees: int = 0, mode: PrecisionMode = INT4) -> BlockScore:
    values, agreeing, zeros = np.array(kl), np.arange(len(kl)) < agrees, np.zeros(len(kl))
    return BlockScore("r", 1, mode, FP32, False, values, agreeing, zeros.astype(np.int64), zeros)


def figures() -> list[ModelFigures]:
    loop = LoopSnapshot(INT4, 7, running=3, waiting=2, blocks_total=100, blocks_free=40, steps=55)
    modes = (ModeState(INT4, True, 1000, 80, 2), ModeState(INT8, True, 500, 9, 1))
    snapshot = ManagerSnapshot("openvino", INT4, 7, "h", "s", (), modes, loop, 4096, "")
    noise = ModeNoise(
        INT4,
        FallbackState.TRIPPED,
        "noise",
        2,
        0.8,
        NoiseWindow(40).statistics(0.0),
        9,
        0,
        12.5,
        11.5,
        1.0,
        1.0,
        1.0,
        (),
    )
    unknown = ModeNoise(
        INT8, FallbackState.HEALTHY, "", 0, None, NoiseWindow(40).statistics(0.0), 9, 0, 0.5, 11.5, 1.0, 1.0, 1.0, ()
    )
    noises = NoiseSnapshot(7, FP32, (noise, unknown), FP32, False, None, 0)
    return [ModelFigures("a", "serving", snapshot, noises), ModelFigures("b", "unloaded", None, None)]


def test_scored_tokens_are_counted_by_mode_and_fall_into_buckets(registry: CollectorRegistry, address: Address) -> None:
    metrics = EventMetrics(registry)
    metrics.count_score("m", score(0.00005, 0.5, 0.6, math.inf, agrees=2))
    metrics.count_score("m", score(0.01, mode=INT8))
    scraped = read(address)
    assert scraped[key("dskd_scored_tokens_total", model="m", mode="int4")] == 4
    assert scraped[key("dskd_agreeing_tokens_total", model="m", mode="int4")] == 2
    assert scraped[key("dskd_kl_nats_count", model="m", mode="int4")] == 3
    assert scraped[key("dskd_kl_nats_sum", model="m", mode="int4")] == pytest.approx(1.10005)
    assert scraped[key("dskd_kl_nats_bucket", model="m", mode="int4", le="0.0001")] == 1
    assert scraped[key("dskd_kl_nats_bucket", model="m", mode="int4", le="0.562")] == 2
    assert scraped[key("dskd_kl_nats_bucket", model="m", mode="int8", le="0.01")] == 1


def test_the_buckets_go_from_a_ten_thousandth_to_ten_nats_in_even_steps() -> None:
    assert (KL_BUCKETS[0], KL_BUCKETS[-1]) == (1e-4, 10.0)
    steps = np.diff(np.log10(KL_BUCKETS))
    assert steps == pytest.approx(0.25, abs=0.005)


def test_logits_that_were_not_finite_are_counted(registry: CollectorRegistry, address: Address) -> None:
    metrics = EventMetrics(registry)
    metrics.count_non_finite("m", NonFinite("r", 1, INT4, INT8))
    metrics.count_non_finite("m", NonFinite("r", 1, INT4, None))
    assert read(address)[key("dskd_non_finite_steps_total", model="m", mode="int4")] == 2


def test_changes_are_counted_by_kind_and_outcome(registry: CollectorRegistry, address: Address) -> None:
    async def events() -> AsyncIterator[Event]:
        for kind in ("switch.committed", "switch.committed", "apply.rejected", "model.serving", "fallback.suppressed"):
            yield Event(1, 0.0, kind, "m", "", {})

    asyncio.run(EventMetrics(registry).count_changes(events()))
    changes = {labels: value for (name, labels), value in read(address).items() if name == "dskd_changes_total"}
    assert changes == {
        key("", model="m", kind="switch", outcome="committed")[1]: 2,
        key("", model="m", kind="apply", outcome="rejected")[1]: 1,
        key("", model="m", kind="fallback", outcome="suppressed")[1]: 1,
    }


def scrape_models(registry: CollectorRegistry, address: Address, models: list[ModelFigures]) -> Scrape:
    async def scrape() -> Scrape:
        registry.register(ModelCollector(lambda: models, asyncio.get_running_loop()))
        return await asyncio.to_thread(read, address)

    return asyncio.run(scrape())


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("dskd_model_state", {"model": "a", "state": "serving"}, 1),
        ("dskd_model_state", {"model": "b", "state": "unloaded"}, 1),
        ("dskd_generation", {"model": "a"}, 7),
        ("dskd_requests_running", {"model": "a"}, 3),
        ("dskd_requests_waiting", {"model": "a"}, 2),
        ("dskd_kv_blocks", {"model": "a"}, 100),
        ("dskd_kv_blocks_free", {"model": "a"}, 40),
        ("dskd_steps_total", {"model": "a"}, 55),
        ("dskd_mode_serving", {"model": "a", "mode": "int4"}, 1),
        ("dskd_mode_serving", {"model": "a", "mode": "int8"}, 0),
        ("dskd_mode_resident_bytes", {"model": "a", "mode": "int8"}, 500),
        ("dskd_mode_requests", {"model": "a", "mode": "int4"}, 2),
        ("dskd_tokens_total", {"model": "a", "mode": "int4"}, 80),
        ("dskd_fallback_state", {"model": "a", "mode": "int4", "state": "tripped"}, 1),
        ("dskd_fallback_state", {"model": "a", "mode": "int4", "state": "healthy"}, 0),
        ("dskd_fallback_state", {"model": "a", "mode": "int8", "state": "healthy"}, 1),
        ("dskd_fallback_trips_total", {"model": "a", "mode": "int4"}, 2),
        ("dskd_kl_threshold_nats", {"model": "a", "mode": "int4"}, 0.8),
        ("dskd_noise_evidence", {"model": "a", "mode": "int4"}, 12.5),
        ("dskd_noise_evidence_needed", {"model": "a", "mode": "int4"}, 11.5),
        ("dskd_build_info", {"version": VERSION}, 1),
    ],
)
def test_a_scrape_reads_the_models(
    registry: CollectorRegistry, address: Address, name: str, labels: dict[str, Any], value: float
) -> None:
    assert scrape_models(registry, address, figures())[key(name, **labels)] == value


def test_a_mode_without_a_threshold_has_no_figure_for_it(registry: CollectorRegistry, address: Address) -> None:
    scraped = scrape_models(registry, address, figures())
    assert key("dskd_kl_threshold_nats", model="a", mode="int8") not in scraped


def test_an_address_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            StartupError, match=rf"cannot answer scrapes on 127\.0\.0\.1:{port}: Address already in use"
        ):
            MetricsServer(Address(host="127.0.0.1", port=port), CollectorRegistry()).start()


def test_after_a_stop_nobody_answers_and_the_address_is_free(registry: CollectorRegistry) -> None:
    server = MetricsServer(ANY_PORT, registry)
    address = server.start()
    server.stop()
    with pytest.raises(urllib.error.URLError):
        read(address)
    again = MetricsServer(address, registry)
    assert again.start() == address
    again.stop()
