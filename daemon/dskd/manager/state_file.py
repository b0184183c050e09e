"""What a manager has committed, on disk: after a crash the daemon comes back serving it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from dskquant.modes import PrecisionMode


@dataclass(frozen=True, slots=True)
class Committed:
    """The mode a model was switched to, and the default that the configuration had then."""

    mode: str
    default_mode: str
    hash: str  # of the generation

    def write(self, path: Path) -> None:
        """Replaces the file durably: whatever happens on the way, it holds the old or the new state, whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        with aside.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def committed_mode(path: Path, default_mode: PrecisionMode) -> PrecisionMode:
    """The mode to start in: the committed one, unless the configuration has got another default since.

    Raises ValueError when the file is damaged.
    """
    try:
        state = Committed(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return default_mode
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return PrecisionMode(state.mode) if state.default_mode == default_mode.value else default_mode
