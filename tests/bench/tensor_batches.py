"""Requests to an encoder through the daemon, one by one and in batches: throughput, latency, and whose answers came."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tests.bench.calls import Calls, call_for
from tests.bench.report import Section
from tests.daemon_process import DaemonProcess, daemon_process
from tests.minilm import random_sentences, write_minilm
from tests.plain_daemon import outputs_of, raw_request
from tests.plain_stores import direct

from dskapi.open_inference import infer_pb2, service_pb2_grpc, statistics_pb2
from dskquant.modes import PrecisionMode
from dskquant.plain.convert import PlainOptions, convert_plain
from dskquant.plain.samples import DataOptions

CLIENTS = 16
TOKENS = (4, 8, 32)
MODES = (PrecisionMode.FP32, PrecisionMode.INT8)
SENTENCES = 32
DELAY_MS = 10.0
"""Longer than it takes all clients to send: else batches fall apart."""
ROUNDS, ROUND_S = 5, 1.5
BATCH_S = 0.3
"""Of each round: requests with a full batch of rows."""

ONE, ALONE, BATCHED = "one", "alone", "batched"
LOADS = {ONE: ("alone", 1), ALONE: ("alone", CLIENTS), BATCHED: ("batched", CLIENTS)}
"""The model that is asked, and by how many."""


@dataclass
class Seen:
    """All rounds of one case."""

    calls: dict[str, list[Calls]] = field(default_factory=lambda: {load: [] for load in LOADS})
    batch_ms: list[float] = field(default_factory=list)  # of the rounds

    def per_s(self, load: str) -> float:
        return statistics.median(calls.per_s for calls in self.calls[load])

    def gain_over(self, load: str) -> float:
        """Of batches, round by round."""
        pairs = zip(self.calls[BATCHED], self.calls[load], strict=True)
        return statistics.median(batched.per_s / other.per_s for batched, other in pairs)

    def percentile_ms(self, percent: float) -> float:
        return statistics.median(calls.percentile_ms(percent) for calls in self.calls[BATCHED])

    @property
    def num_batched(self) -> int:
        return sum(len(calls.seconds) for calls in self.calls[BATCHED])


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
        for name in models:
            daemon.wait_until_serving(name)
        rows = [_row(daemon, store, mode.value, tokens) for mode in MODES for tokens in TOKENS]
    return Section(
        "Plain graphs: batches",
        f"all-MiniLM-L6-v2 on ONNX Runtime, sentences of so many tokens, asked through the daemon by clients with a "
        f"connection each, in one process beside it on the same cores. Batches have up to {CLIENTS} rows and wait "
        f"{DELAY_MS:g} ms at most. Medians of {ROUNDS} interleaved rounds of {ROUND_S:g} s; gains and p99 are of each "
        "round. Throughput against one client that asks one by one, and against as many clients without batching. The "
        "time of a batch is that of a request with as many rows, through the daemon. Wrong: answers that are nearer to "
        "what ONNX Runtime alone makes of another sentence than to that of their own.",
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
            "wrong answers",
        ],
        rows,
    )


def _row(daemon: DaemonProcess, store: Path, mode: str, tokens: int) -> list[str]:
    sentences = [random_sentences(1, tokens, seed) for seed in range(SENTENCES)]
    runs, seen = -_runs(daemon), Seen()
    for _ in range(ROUNDS):
        seen.batch_ms.append(_batch_ms(daemon, mode, tokens))
        for load, (model, clients) in LOADS.items():
            requests = [raw_request(model, each, precision=mode).SerializeToString() for each in sentences]
            seen.calls[load].append(call_for(daemon.target, requests, clients, ROUND_S))
    runs += _runs(daemon)
    return [
        f"{mode}, {tokens}",
        *(f"{seen.per_s(load):.0f}/s" for load in LOADS),
        f"{seen.gain_over(ONE):.2f}x",
        f"{seen.gain_over(ALONE):.2f}x",
        f"{seen.percentile_ms(50):.0f} / {seen.percentile_ms(99):.0f} ms",
        f"{DELAY_MS + 2 * statistics.median(seen.batch_ms):.0f} ms",
        f"{seen.num_batched / runs:.1f}",
        f"{_wrong(seen, _expected(store, mode, sentences))} of {seen.num_batched}",
    ]


def _expected(store: Path, mode: str, sentences: list[dict[str, NDArray[np.int64]]]) -> NDArray[np.float32]:
    """[sentences, width]: what ONNX Runtime alone answers."""
    return np.concatenate([direct(store / f"{mode}.onnx", each)["embedding"] for each in sentences])


def _wrong(seen: Seen, expected: NDArray[np.float32]) -> int:
    answers = [answer for calls in seen.calls[BATCHED] for answer in calls.answers]
    return sum(_nearest(answer, expected) != index for index, answer in answers)


def _nearest(answer: bytes, expected: NDArray[np.float32]) -> int:
    embedding = outputs_of(infer_pb2.ModelInferResponse.FromString(answer))["embedding"]
    return int(np.linalg.norm(expected - embedding, axis=1).argmin())


def _runs(daemon: DaemonProcess) -> int:
    """Batches so far."""
    with _connected(daemon) as stub:
        request = statistics_pb2.ModelStatisticsRequest(name="batched")
        return int(stub.ModelStatistics(request).model_stats[0].execution_count)


def _batch_ms(daemon: DaemonProcess, mode: str, tokens: int) -> float:
    """Median of requests with a full batch of rows."""
    request = raw_request("alone", random_sentences(CLIENTS, tokens), precision=mode).SerializeToString()
    return call_for(daemon.target, [request], 1, BATCH_S).percentile_ms(50)


@contextmanager
def _connected(daemon: DaemonProcess) -> Iterator[Any]:
    with grpc.insecure_channel(daemon.target) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
