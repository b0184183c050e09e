"""What a manager has committed, on disk: after a crash the daemon comes back serving it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import structlog

from dskd import durable, typed_json
from dskd.manager.types import HistoryEntry
from dskquant.errors import SchemeError
from dskquant.modes import PrecisionMode
from dskquant.scheme import LayerRule

FORMAT_VERSION = 1

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


@dataclass(frozen=True, slots=True)
class KeptGeneration:
    """What a generation is rebuilt from. Raises ValueError for values that no generation has."""

    number: int
    hash: str
    parameter_set: str  # hash of its parameter set
    layers: tuple[LayerRule, ...]
    committed: float  # seconds since the epoch
    kl: dict[PrecisionMode, float]  # to the reference on the golden prompts, nats per token

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"generation {self.number}: numbers start at 1")
        if not self.hash or not self.parameter_set:
            raise ValueError(f"generation {self.number}: has no hash, or its parameter set has none")
        if not all(math.isfinite(value) for value in (self.committed, *self.kl.values())):
            raise ValueError(f"generation {self.number}: committed and kl must be finite")


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed state of a model. Raises ValueError when its parts contradict each other."""

    mode: PrecisionMode
    default_mode: PrecisionMode  # of the configuration, then
    generation: int  # the active one
    last_number: int  # the highest a generation had so far
    kept: tuple[KeptGeneration, ...]  # the active one and those to roll back to; newest commit first
    change: HistoryEntry | None  # that led here
    pinned: bool = False  # the mode, by an operator
    monitor: str = ""  # what quant configs say of the noise monitor: a JSON object

    def __post_init__(self) -> None:
        numbers = [generation.number for generation in self.kept]
        if self.generation not in numbers:
            raise ValueError(f"the active generation {self.generation} is not among the kept {numbers}")
        if len(set(numbers)) < len(numbers) or max(numbers) > self.last_number:
            raise ValueError(f"kept generations {numbers}: must be different, up to last_number {self.last_number}")

    def write(self, path: Path) -> None:
        """Replaces the file durably; what it held before is kept beside it. Raises OSError."""
        state = {"format_version": FORMAT_VERSION, **typed_json.dump(self)}
        text = json.dumps(state, indent=2) + "\n"
        # a damaged one must not push out the last good one
        durable.replace_file(path, text.encode(), keep_previous=previous_of(path) if _is_whole(path) else None)


def previous_of(path: Path) -> Path:
    """Where the state before that in `path` is kept."""
    return path.with_name(f"{path.name}.previous")  # not .json: it cannot be the state file of another model


def read_committed(path: Path) -> list[Committed]:
    """The committed state and the one before it, newest first; one that cannot be read is logged and left out."""
    states = (_read_or_tell(candidate) for candidate in (path, previous_of(path)))
    return [state for state in states if state is not None]


def _read_or_tell(path: Path) -> Committed | None:
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.error("committed state cannot be read", path=str(path), reason=str(error))
        return None


def committed_mode(committed: Committed, default_mode: PrecisionMode) -> PrecisionMode:
    """The mode to start in: the committed one, unless the configuration has got another default since."""
    return committed.mode if committed.default_mode is default_mode else default_mode


def _is_whole(path: Path) -> bool:
    try:
        _read(path)
    except (OSError, ValueError):
        return False
    return True


def _read(path: Path) -> Committed:
    table = typed_json.parse(path.read_bytes())
    version = table.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version {version!r}; this version reads {FORMAT_VERSION}")
    try:
        return typed_json.load(Committed, table)
    except SchemeError as error:
        raise ValueError(str(error)) from error
