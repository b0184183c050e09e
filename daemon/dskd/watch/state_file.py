"""What the watcher keeps over a restart: the last good content of each file, and what each model was made to serve."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from dskd import durable, quant_config, typed_json
from dskd.quant_config import QuantConfig
from dskd.typed_toml import ConfigError

FORMAT_VERSION = 1

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


@dataclass(frozen=True, slots=True)
class WatchState:
    """Both by name: of the file, of the model."""

    texts: dict[str, str] = field(default_factory=dict)
    applied: dict[str, QuantConfig] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replaces the file durably. Raises OSError."""
        applied = {model: quant_config.to_table(config) for model, config in self.applied.items()}
        content = {"format_version": FORMAT_VERSION, "texts": self.texts, "applied": applied}
        durable.replace_file(path, json.dumps(content).encode())

    @classmethod
    def read(cls, path: Path) -> WatchState:
        """The state in the file, empty when there is none.

        A file that is damaged or cannot be read counts as none, and that is logged: all configs are applied anew then.
        """
        try:
            return _load(typed_json.parse(path.read_bytes()))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, ConfigError) as error:
            log.error("state of the watcher cannot be read; starting without", path=str(path), reason=str(error))
            return cls()


def _load(table: dict[str, Any]) -> WatchState:
    """Raises ValueError or ConfigError."""
    version, texts, applied = (table.get(key) for key in ("format_version", "texts", "applied"))
    if version != FORMAT_VERSION or not isinstance(texts, dict) or not isinstance(applied, dict):
        raise ValueError(f"it must have texts, applied and format_version {FORMAT_VERSION}")
    if not all(isinstance(value, str) for value in texts.values()):
        raise ValueError("texts: one is no text")
    if not all(isinstance(value, dict) for value in applied.values()):
        raise ValueError("applied: one is no config")
    return WatchState(texts, {model: quant_config.from_table(item, Path("/")) for model, item in applied.items()})
