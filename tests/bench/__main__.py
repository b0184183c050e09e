"""`python -m tests.bench [SECTION ...]`: measures, and writes docs/measurements.md when all sections ran."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.bench import memory, noise, plain, report, speed, switching, synthetic

from dskquant.convert import ConvertOptions, convert
from dskquant.modes import PrecisionMode

CACHE = Path(__file__).parents[2] / ".cache"
GGUF = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = CACHE / "bench" / "smollm2"
LLAMA = CACHE / "bench" / "llama-1.5b"
PLAIN = {mode: CACHE / "bench" / f"plain-{mode.value}" for mode in (PrecisionMode.INT4, PrecisionMode.INT8)}

SECTIONS: dict[str, Callable[[], report.Section]] = {
    "noise": lambda: noise.measure(SMOLLM2),
    "switches": lambda: switching.measure_pairs(SMOLLM2),
    "gaps": lambda: switching.measure_gaps(LLAMA),
    "memory": lambda: memory.measure(LLAMA, PLAIN[PrecisionMode.INT8]),
    "speed": lambda: speed.measure(LLAMA, PLAIN),
}


def _prepare() -> None:
    """Makes the stores once."""
    if not SMOLLM2.exists():
        convert(GGUF, SMOLLM2, ConvertOptions(), lambda *_: None)
    if not LLAMA.exists():
        synthetic.make_store(SMOLLM2, LLAMA)
    for mode, directory in PLAIN.items():
        if not directory.exists():
            plain.export_plain(LLAMA, mode, directory)


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        sys.exit(f"unknown section {unknown[0]!r}; known: {', '.join(SECTIONS)}")
    _prepare()
    sections = []
    for name in names or SECTIONS:
        sections.append(SECTIONS[name]())
        print(sections[-1].markdown(), flush=True)
    if not names:
        report.write(sections)


if __name__ == "__main__":
    main(sys.argv[1:])
