"""Looks at the machine and the configuration before (or instead of) serving, and says what to mind."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from dskd import memory
from dskd.config import Config, EngineUse, ModelConfig, load_config
from dskd.engine.step_times import StepTimes
from dskd.manager.timings_file import timings_file
from dskd.typed_toml import ConfigError
from dskd.units import format_bytes
from dskquant.errors import StoreError
from dskquant.modes import LADDER
from dskquant.plain.store import PlainManifest, StoredGraph, is_plain_store
from dskquant.store import StoreManifest, file_sha256

ENGINE_PACKAGES = ("openvino", "onnxruntime", "tokenizers", "grpcio")

CPU_FEATURES = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "bf16": ("avx512_bf16",),
    "AMX": ("amx_tile",),
}
"""What the engines make use of, and the flags of /proc/cpuinfo that show it."""


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    level: Level
    subject: str
    detail: str


def examine(config_path: Path | None, root: Path = memory.ROOT) -> list[Finding]:
    """All findings, in the order to read them. `root` is where /proc and /sys are."""
    return [*_cpu(root), _memory(root), *map(_package, ENGINE_PACKAGES), *_configuration(config_path)]


def _cpu(root: Path) -> Iterator[Finding]:
    flags = _cpu_flags(root)
    present = [name for name, marks in CPU_FEATURES.items() if flags.intersection(marks)]
    yield Finding(Level.OK, "cpu", f"{len(os.sched_getaffinity(0))} cores; {', '.join(present) or 'no known features'}")
    if "AVX2" in present and "VNNI" not in present:
        yield Finding(
            Level.WARNING,
            "cpu",
            "no VNNI: products of unsigned and signed 8-bit numbers are summed in 16 bits and may saturate silently; "
            "set activation_group = 0 and compare INT8 against FP32",
        )


def _cpu_flags(root: Path) -> set[str]:
    """Flags of the first CPU (x86: "flags", Arm: "Features")."""
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def _memory(root: Path) -> Finding:
    return Finding(Level.OK, "memory", f"{format_bytes(memory.available_bytes(root))} available to this process")


def _package(name: str) -> Finding:
    try:
        return Finding(Level.OK, name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(Level.FAILED, name, "is not installed; in the source directory: pip install '.[daemon]'")


def _configuration(path: Path | None) -> Iterator[Finding]:
    try:
        config = load_config(path)
    except ConfigError as error:
        yield from (Finding(Level.FAILED, "config", problem) for problem in error.lines)
        return
    yield Finding(Level.OK, "config", f"{path} is valid" if path else "none; the defaults are used")
    yield from _stores(config)


def _stores(config: Config) -> Iterator[Finding]:
    for name, model in config.models.items():
        try:
            damaged = _damaged_files(model.path)
        except (StoreError, OSError) as error:
            damaged = [str(error)]
        if damaged:
            yield Finding(Level.FAILED, f"models.{name}", "; ".join(damaged))
        else:
            yield Finding(Level.OK, f"models.{name}", f"{model.path} is whole")
        if model.engine is EngineUse.AUTO:
            yield from _step_times(f"models.{name}", model, config.server.model_state(name))


def _step_times(subject: str, model: ModelConfig, model_state: Path) -> Iterator[Finding]:
    """Which engine makes the tokens of how many streams, as far as it has been measured."""
    engines = (EngineUse.OPENVINO.value, EngineUse.ONNXRUNTIME.value)
    times = StepTimes(timings_file(model_state, model, engines).read())
    for mode in LADDER:
        told = [
            f"{rows} at a time " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in found)
            for rows, found in times.compare(engines, mode).items()
        ]
        if told:
            yield Finding(Level.OK, subject, f"a step in {mode.value}: {'; '.join(told)}")


def _damaged_files(store: Path) -> list[str]:
    """Files of the store that are missing or differ from its manifest."""
    if is_plain_store(store):
        return list(_damaged_graphs(store))
    problems = []
    for name, digest in StoreManifest.read(store).sha256.items():
        path = store / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif file_sha256(path) != digest:
            problems.append(f"{path} is damaged: its SHA-256 is not that of the manifest; convert the model again")
    return problems


def _damaged_graphs(store: Path) -> Iterator[str]:
    for graph in PlainManifest.read(store).graphs.values():
        problem = _problem_of(graph, store)
        if problem:
            yield problem


def _problem_of(graph: StoredGraph, store: Path) -> str:
    try:
        graph.verify(store)
    except StoreError as error:
        return f"{error}; convert the model again"
    return ""


def as_json(findings: list[Finding]) -> str:
    """One JSON array of objects with the keys level, subject, detail."""
    return json.dumps([{**asdict(finding), "level": finding.level.value} for finding in findings], indent=2)


def as_text(findings: list[Finding]) -> str:
    """One line for each finding."""
    return "\n".join(f"{finding.level.value:8} {finding.subject:16} {finding.detail}" for finding in findings)
