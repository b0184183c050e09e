"""`python -m tests.bench [SECTION ...]`: measures all or some sections and writes docs/measurements.md."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import structlog
from tests.bench import memory, noise, plain, report, speed, swaps, switching, synthetic, tensor_batches
from tests.bench.monitor import damage, estimate, false_trips, overhead, quality, scope, texts

from dskquant.convert import ConvertOptions, convert
from dskquant.modes import PrecisionMode

CACHE = Path(__file__).parents[2] / ".cache"
GGUF = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = CACHE / "bench" / "smollm2"
LLAMA = CACHE / "bench" / "llama-1.5b"
ENCODER = CACHE / "bench" / "encoder"
PLAIN = {mode: CACHE / "bench" / f"plain-{mode.value}" for mode in (PrecisionMode.INT4, PrecisionMode.INT8)}


def _calibrated() -> Path:
    return texts.calibrated_set(SMOLLM2, CACHE / "bench" / "sets")


SECTIONS: dict[str, Callable[[], report.Section]] = {
    "noise": lambda: noise.measure(SMOLLM2),
    "switches": lambda: switching.measure_pairs(SMOLLM2),
    "gaps": lambda: switching.measure_gaps(LLAMA),
    "swaps": lambda: swaps.measure(SMOLLM2),
    "soak": lambda: swaps.soak(SMOLLM2),
    "kills": swaps.kills,
    "memory": lambda: memory.measure(LLAMA, PLAIN[PrecisionMode.INT8]),
    "speed": lambda: speed.measure(LLAMA, PLAIN),
    "plain": lambda: tensor_batches.measure(ENCODER),
    "monitor-estimate": lambda: estimate.measure(SMOLLM2),
    "monitor-damage": lambda: damage.measure(SMOLLM2, _calibrated()),
    "monitor-scope": lambda: scope.measure(SMOLLM2, _calibrated()),
    "monitor-false-trips": lambda: false_trips.measure(SMOLLM2, _calibrated()),
    "monitor-overhead": lambda: overhead.measure(LLAMA),
    "monitor-quality": lambda: quality.measure(SMOLLM2, _calibrated(), report.DESTINATION.with_name("pareto.png")),
}


def _prepare() -> None:
    """Makes the stores once."""
    if not SMOLLM2.exists():
        convert(GGUF, SMOLLM2, ConvertOptions(), lambda *_: None)
    if not LLAMA.exists():
        synthetic.make_store(SMOLLM2, LLAMA)
    if not ENCODER.exists():
        tensor_batches.make_store(ENCODER)
    for mode, directory in PLAIN.items():
        if not directory.exists():
            plain.export_plain(LLAMA, mode, directory)


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        sys.exit(f"unknown section {unknown[0]!r}; known: {', '.join(SECTIONS)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    _prepare()
    for name in names or SECTIONS:
        section = SECTIONS[name]()
        print(section.markdown(), flush=True)
        report.keep(name, section)
    report.write(SECTIONS)


if __name__ == "__main__":
    main(sys.argv[1:])
