"""Single requests to convolutional graphs through the daemon: latency in INT8 beside FP32."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.calls import call_for
from tests.bench.report import Section
from tests.daemon_process import daemon_process
from tests.plain_daemon import raw_request
from tests.plain_models import CACHE, Arrays, lines, pages, present, saved

from dskquant.errors import EngineError
from dskquant.modes import PrecisionMode
from dskquant.plain.convert import PlainOptions, convert_plain
from dskquant.plain.samples import DataOptions
from dskquant.plain.store import PlainManifest

ROUNDS, ROUND_S = 5, 1.5
MODES = (PrecisionMode.FP32, PrecisionMode.INT8)
HEALTHY_DB = 10.0
"""What the converter asks of a mode, too."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph of PP-OCR, and an input size for it."""

    source: str
    told: str
    samples: Arrays


@dataclass
class Latencies:
    """Of one mode, in milliseconds, by round."""

    means: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)


def graphs() -> dict[str, Graph]:
    return {
        "cls": Graph("ppocr_cls.onnx", "classifier of directions, 48 x 192", lines(8)),
        "rec-96": Graph("ppocr_rec.onnx", "recognizer, 48 x 96", lines(8, width=96)),
        "det-160": Graph("ppocr_det.onnx", "detector, 160 x 160", pages(8)),
    }


def make_stores(folder: Path) -> None:
    """Those that are not there yet, in FP32 and INT8."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, graph in graphs().items():
        if not (folder / name).exists():
            data = DataOptions(saved(folder / f"{name}.npz", graph.samples))
            options = PlainOptions(data, modes=(PrecisionMode.INT8,), min_sqnr_db=HEALTHY_DB)
            convert_plain(present(CACHE / graph.source), folder / name, options, lambda *_: None)


def measure(folder: Path) -> Section:
    """FP32 and INT8 in turn, each on the engine that `auto` has found to be the faster one."""
    common = {"engine": "auto", "resident": ["int8", "fp32"], "default_mode": "int8", "monitor": {"share": 0.0}}
    with daemon_process({name: {**common, "path": str(folder / name)} for name in graphs()}) as daemon:
        daemon.start()
        for name in graphs():
            daemon.wait_until_serving(name)
        rows = [_row(daemon.target, folder, name, graph) for name, graph in graphs().items()]
    return Section(
        "Plain graphs: convolutions in INT8",
        f"Graphs of PP-OCRv4 asked by one client over the socket, one image a request, each mode on the engine that "
        f'engine = "auto" has measured to be the faster one; medians of {ROUNDS} interleaved rounds of {ROUND_S:g} s. '
        "SQNR: of INT8 on the calibration data.",
        ["graph", "SQNR", "FP32 mean / p99", "INT8 mean / p99", "INT8 against FP32"],
        rows,
    )


def _row(target: str, folder: Path, name: str, graph: Graph) -> list[str]:
    seen = {mode: Latencies() for mode in MODES}
    for _ in range(ROUNDS):
        for mode, latencies in seen.items():
            calls = call_for(target, _requests(name, graph, mode), 1, ROUND_S)
            latencies.means.append(statistics.mean(calls.seconds) * 1e3)
            latencies.p99s.append(calls.percentile_ms(99))
    exact, quantized = seen.values()
    gain = statistics.median(one / other for one, other in zip(exact.means, quantized.means, strict=True))
    return [graph.told, _noise_of(folder / name), *map(_told, seen.values()), _told_gain(gain)]


def _requests(name: str, graph: Graph, mode: PrecisionMode) -> list[bytes]:
    rows = len(next(iter(graph.samples.values())))
    samples = [{key: values[row : row + 1] for key, values in graph.samples.items()} for row in range(rows)]
    return [raw_request(name, sample, precision=mode.value).SerializeToString() for sample in samples]


def _noise_of(store: Path) -> str:
    noise = PlainManifest.read(store).graphs[PrecisionMode.INT8].noise
    if noise is None:
        raise EngineError(f"{store}: INT8 was not measured")
    return f"{noise.sqnr_db:.1f} dB"


def _told(latencies: Latencies) -> str:
    return f"{statistics.median(latencies.means):.1f} / {statistics.median(latencies.p99s):.1f} ms"


def _told_gain(gain: float) -> str:
    return f"{gain:.2f}x as fast" if gain >= 1 else f"slower: {gain:.2f}x"
