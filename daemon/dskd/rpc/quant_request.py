"""From the protocol's ApplyConfigRequest to the quant config it holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dskapi.v1 import control_pb2
from dskd.errors import FailedPreconditionError, InvalidArgumentError, InvalidFieldsError
from dskd.quant_config import QuantConfig, parse
from dskd.typed_toml import ConfigError

CONFIG, FILE, BASE = "config", "params.file", "base_directory"
"""Fields as the details of a refusal name them."""

PATHS_NOT_ALLOWED = (
    "a client of another machine may not name a file of this one (params.file): "
    "call over a unix socket of the daemon, or set allow_load_from_path in its [server] section"
)

_FIELD_AND_PROBLEM = re.compile(r"(?P<field>[\w.\[\]-]+)(?:: | = )(?P<problem>.+)", re.DOTALL)
_NOWHERE = Path("/dev/null")
"""Nothing can be below it: relative paths of a config start here when there is no directory for them."""


@dataclass(frozen=True, slots=True)
class QuantRequestReader:
    """Reads the quant configs that clients send."""

    watched: Path | None  # where relative paths start unless the request says where
    allow_paths: bool  # to clients of other machines too

    def read(self, request: control_pb2.ApplyConfigRequest, peer: str) -> QuantConfig:
        """The config of `request`, which takes time to parse: not on the event loop.

        Raises InvalidFieldsError, InvalidArgumentError, and FailedPreconditionError for a path `peer` may not name.
        """
        config = _parsed(request.config, self._base(request.base_directory))
        if not (config.precision or config.params or config.layers or config.monitor):
            raise InvalidArgumentError(CONFIG, "asks for nothing: no precision, no params, no layers and no monitor")
        if config.params:
            self._check_path(config.params.file, peer)
        return config

    def _base(self, directory: str) -> Path:
        if not directory:
            return self.watched or _NOWHERE
        if not Path(directory).is_absolute():
            raise InvalidArgumentError(BASE, f"{directory!r} must be absolute")
        return Path(directory)

    def _check_path(self, file: Path, peer: str) -> None:
        """A set is read with the daemon's rights, and what is wrong with it is told: not to everybody."""
        if not (peer.startswith("unix:") or self.allow_paths):
            raise FailedPreconditionError("server.allow_load_from_path", PATHS_NOT_ALLOWED)
        if file.is_relative_to(_NOWHERE):
            relative = file.relative_to(_NOWHERE)
            problem = (
                f"must be absolute: {str(relative)!r} is not, {BASE} is empty, and the daemon watches no directory"
            )
            raise InvalidArgumentError(FILE, problem)


def _parsed(text: str, base: Path) -> QuantConfig:
    try:
        return parse(text, CONFIG, base)
    except ConfigError as error:
        raise InvalidFieldsError(map(_violation, error.problems), error.more) from error


def _violation(problem: str) -> tuple[str, str]:
    """Field and description; what is wrong with the text as a whole is wrong with the field that holds it."""
    text = problem.removeprefix(f"{CONFIG}: ")
    match = _FIELD_AND_PROBLEM.fullmatch(text)
    return (match["field"], match["problem"]) if match else (CONFIG, text)
