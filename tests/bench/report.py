"""What a benchmark section returns, and docs/measurements.md made of it."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
DESTINATION = ROOT / "docs" / "measurements.md"
RESULTS = ROOT / ".cache" / "bench" / "results"


@dataclass(frozen=True, slots=True)
class Section:
    """A table and what has to be said about it."""

    title: str
    text: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", self.text, "", _row(self.headings), _row(["---"] * len(self.headings))]
        return "\n".join([*lines, *map(_row, self.rows), ""])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine() -> str:
    """One line about where and when."""
    cpu = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    cores = Path("/proc/cpuinfo").read_text().count("processor\t")
    engines = ", ".join(f"{name} {version(name)}" for name in ("openvino", "openvino-genai"))
    return f"{datetime.date.today().isoformat()}, {cpu}, {cores} cores, Python {platform.python_version()}, {engines}"


def keep(name: str, section: Section) -> None:
    """Keeps a section for `write`, with where and when it was measured."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"{section.markdown()}\nMeasured on {machine()}.\n", encoding="utf-8")


def write(names: Iterable[str]) -> None:
    """Replaces docs/measurements.md by the newest results of the sections `names`."""
    head = (
        "# Measurements\n\n"
        "Made by `make bench`. Shared, noisy machines: trust the ratios, which compare interleaved runs (medians), not "
        "the absolute times.\n"
    )
    results = [RESULTS / f"{name}.md" for name in names]
    DESTINATION.parent.mkdir(exist_ok=True)
    DESTINATION.write_text(
        "\n".join([head, *(path.read_text() for path in results if path.exists())]), encoding="utf-8"
    )
