"""The version of the installed project."""

from __future__ import annotations

from importlib import metadata


def _installed() -> str:
    try:
        return metadata.version("dskd")
    except metadata.PackageNotFoundError:
        return "not installed"  # run from a source tree


VERSION = _installed()
