"""What `dskctl apply` is given: a quant config, or a parameter set that one is written for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dskctl.exits import UsageError

MANIFEST = "manifest.json"
CONFIG_SUFFIX = ".toml"


def manifest_of(path: Path) -> Path | None:
    """The manifest of a parameter set; None when `path` is a quant config. Raises UsageError when it is neither."""
    if path.is_dir():
        if not (path / MANIFEST).exists():
            raise UsageError(f"{path}: no parameter set: the directory has no {MANIFEST}")
        return path / MANIFEST
    if path.name == MANIFEST:
        return path
    if path.suffix == CONFIG_SUFFIX:
        return None
    raise UsageError(f"{path}: neither a quant config (*{CONFIG_SUFFIX}) nor a parameter set (a directory)")


def read_config(path: Path) -> str:
    """The text of a quant config. Raises UsageError."""
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not valid UTF-8 (byte {error.start})") from None


def config_for_set(manifest: Path, model: str, in_flight: str | None) -> str:
    """A quant config that asks for this set, and for no other that may come to lie there. Raises UsageError."""
    lines = [f"model = {toml_string(model)}"]
    if in_flight:
        lines.append(f"in_flight = {toml_string(in_flight)}")
    digest = hashlib.sha256(_read(manifest)).hexdigest()
    lines += ["", "[params]", f"file = {toml_string(absolute(manifest.parent))}", f'sha256 = "{digest}"', ""]
    return "\n".join(lines)


def toml_string(text: str) -> str:
    """`text` as a basic string of TOML, which is JSON's except that DEL must be escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def absolute(path: Path) -> str:
    """`path` from the root on. Raises UsageError when the protocol cannot carry it."""
    try:
        text = str(path.absolute())
        text.encode()
    except OSError as error:
        raise UsageError(f"the current directory: {error.strerror}") from error
    except UnicodeEncodeError:
        raise UsageError(f"{str(path.absolute())!r} is not valid UTF-8") from None
    return text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
