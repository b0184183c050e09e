"""Requests to an encoder through the daemon, one by one and in batches: throughput and latency."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tests.bench.report import Section
from tests.daemon_process import DaemonProcess, daemon_process
from tests.minilm import random_sentences, write_minilm
from tests.plain_daemon import outputs_of, raw_request

from dskapi.open_inference import service_pb2_grpc, statistics_pb2
from dskquant.modes import PrecisionMode
from dskquant.plain.convert import PlainOptions, convert_plain
from dskquant.plain.samples import DataOptions

CLIENTS = 16
TOKENS = (4, 8, 32)
MODES = (PrecisionMode.FP32, PrecisionMode.INT8)
DELAY_MS = 5.0
ROUNDS, ROUND_S = 3, 2.5


@dataclass
class Load:
    """What clients saw."""

    seconds: list[float] = field(default_factory=list)  # of each request
    span_s: float = 0.0

    @property
    def per_s(self) -> float:
        return len(self.seconds) / self.span_s

    def percentile_ms(self, percent: float) -> float:
        return float(np.percentile(self.seconds, percent)) * 1e3


def make_store(store: Path) -> None:
    """The encoder in FP32 and INT8, calibrated on sentences of its own vocabulary."""
    store.parent.mkdir(parents=True, exist_ok=True)
    source, data = store.with_suffix(".onnx"), store.with_suffix(".npz")
    write_minilm(source)
    inputs = [random_sentences(1, 16, seed) for seed in range(16)]
    np.savez(data, **{name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]})
    options = PlainOptions(DataOptions(data, rows=16), modes=(PrecisionMode.INT8,))
    convert_plain(source, store, options, lambda *_: None)


def measure(store: Path) -> Section:
    """Interleaves the ways of asking, so that whatever else the machine does hits all of them."""
    common = {"path": str(store), "engine": "onnxruntime", "resident": ["int8", "fp32"], "default_mode": "int8"}
    quiet = {"share": 0.0}
    batching = {"max_size": CLIENTS, "max_delay_ms": DELAY_MS}
    models = {
        "alone": {**common, "monitor": quiet},
        "batched": {**common, "monitor": quiet, "batching": batching},
    }
    with daemon_process(models) as daemon:
        daemon.start()
        rows = [row for mode in MODES for tokens in TOKENS for row in _rows(daemon, mode.value, tokens)]
    return Section(
        "Plain graphs: batches",
        f"all-MiniLM-L6-v2 on ONNX Runtime, sentences of so many tokens, asked through the daemon by clients in one "
        f"process beside it. Batches have up to {CLIENTS} rows and wait {DELAY_MS:g} ms at most; the time of one is "
        "that of a request with as many rows, through the daemon. Throughput against one client that asks one by one, "
        "and against as many clients without batching.",
        [
            "mode, tokens",
            "1 client",
            f"{CLIENTS} clients, no batching",
            f"{CLIENTS} clients, batching",
            "gain over 1 client",
            "gain over no batching",
            "p50 / p99",
            "delay + 2 batches",
            "rows a batch",
        ],
        rows,
    )


def _rows(daemon: DaemonProcess, mode: str, tokens: int) -> Iterator[list[str]]:
    loads = {("alone", 1): Load(), ("alone", CLIENTS): Load(), ("batched", CLIENTS): Load()}
    batch_ms = _batch_ms(daemon, mode, tokens)
    runs = -_runs(daemon)
    for _ in range(ROUNDS):
        for (model, clients), load in loads.items():
            _add_load(load, daemon, model, mode, tokens, clients)
    runs += _runs(daemon)
    one, alone, batched = loads.values()
    yield [
        f"{mode}, {tokens}",
        f"{one.per_s:.0f}/s",
        f"{alone.per_s:.0f}/s",
        f"{batched.per_s:.0f}/s",
        f"{batched.per_s / one.per_s:.2f}x",
        f"{batched.per_s / alone.per_s:.2f}x",
        f"{batched.percentile_ms(50):.0f} / {batched.percentile_ms(99):.0f} ms",
        f"{DELAY_MS + 2 * batch_ms:.0f} ms",
        f"{len(batched.seconds) / runs:.1f}",
    ]


def _runs(daemon: DaemonProcess) -> int:
    """Batches so far."""
    with _connected(daemon) as stub:
        request = statistics_pb2.ModelStatisticsRequest(name="batched")
        return int(stub.ModelStatistics(request).model_stats[0].execution_count)


def _batch_ms(daemon: DaemonProcess, mode: str, tokens: int) -> float:
    with _connected(daemon) as stub:
        request = raw_request("alone", random_sentences(CLIENTS, tokens), precision=mode)
        return statistics.median(_timed(stub, request) for _ in range(20)) * 1e3


def _timed(stub: Any, request: Any) -> float:
    began = time.perf_counter()
    outputs_of(stub.ModelInfer(request))
    return time.perf_counter() - began


def _add_load(load: Load, daemon: DaemonProcess, model: str, mode: str, tokens: int, clients: int) -> None:
    """A round: every client asks again as soon as it has its answer."""
    requests = [raw_request(model, random_sentences(1, tokens, seed), precision=mode) for seed in range(32)]
    start, end = threading.Barrier(clients + 1), time.perf_counter() + ROUND_S

    def ask(client: int) -> Sequence[float]:
        times: list[float] = []
        with _connected(daemon) as stub:
            _timed(stub, requests[client])
            start.wait()
            while time.perf_counter() < end:
                times.append(_timed(stub, requests[(client + len(times)) % len(requests)]))
        return times

    with ThreadPoolExecutor(clients) as threads:
        working = [threads.submit(ask, client) for client in range(clients)]
        start.wait()
        began = time.perf_counter()
        for work in working:
            load.seconds += work.result()
        load.span_s += time.perf_counter() - began


@contextmanager
def _connected(daemon: DaemonProcess) -> Iterator[Any]:
    with grpc.insecure_channel(daemon.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
