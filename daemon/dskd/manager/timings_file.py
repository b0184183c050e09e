"""What was measured of step times, on disk, for as long as the machine and the engines stay the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import structlog

from dskd import durable, memory, typed_json
from dskd.config import ModelConfig
from dskd.engine.step_times import StepKind
from dskquant.modes import PrecisionMode

TIMINGS = "timings.json"

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


@dataclass(frozen=True, slots=True)
class _Step:
    engine: str
    mode: PrecisionMode
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Timings:
    fingerprint: str
    steps: tuple[_Step, ...]


class TimingsFile:
    """The times of one model. All methods touch the disk."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """`fingerprint`: what the times depend on; those of another one are of no use."""
        self._path = path
        self._fingerprint = fingerprint

    def read(self) -> dict[StepKind, float]:
        """The times that hold here; none where nothing was measured, or it cannot be read, which is logged."""
        try:
            kept = typed_json.load(_Timings, typed_json.parse(self._path.read_bytes()))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("step times cannot be read", path=str(self._path), reason=str(error))
            return {}
        if kept.fingerprint != self._fingerprint:
            return {}
        return {StepKind(step.engine, step.mode, step.rows): step.seconds for step in kept.steps}

    def write(self, seconds: Mapping[StepKind, float]) -> None:
        """Replaces the file durably; a failure is logged: the times can be measured again."""
        steps = tuple(_Step(*kind, seconds=value) for kind, value in sorted(seconds.items(), key=str))
        text = json.dumps(typed_json.dump(_Timings(self._fingerprint, steps)), indent=2) + "\n"
        try:
            durable.replace_file(self._path, text.encode())
        except OSError as error:
            log.warning("step times cannot be kept", path=str(self._path), reason=str(error))


def timings_file(model_state: Path, config: ModelConfig, engines: Iterable[str]) -> TimingsFile:
    """That of a model whose state is kept in `model_state`."""
    return TimingsFile(model_state / TIMINGS, fingerprint(engines, config))


def fingerprint(engines: Iterable[str], config: ModelConfig, root: Path = memory.ROOT) -> str:
    """What step times depend on: the machine, the model, the engines, and how graphs are compiled."""
    threads = config.threads or len(os.sched_getaffinity(0))
    compiled = asdict(config.options) | {"weights": config.weights.value, "threads": threads}
    versions = {name: _version(name) for name in engines}
    return json.dumps({"cpu": _cpu_model(root), "model": str(config.path)} | versions | compiled, sort_keys=True)


def _cpu_model(root: Path) -> str:
    """Of the first CPU; "" where the kernel does not tell (Arm)."""
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""


def _version(engine: str) -> str:
    """Of the package that has the name of the engine; "" for an engine that is not a package."""
    try:
        return metadata.version(engine)
    except metadata.PackageNotFoundError:
        return ""
