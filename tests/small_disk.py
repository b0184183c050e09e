"""File systems that refuse to be written."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def disk_of(size: str, directory: Path) -> Iterator[Path]:
    """A file system of its own of `size`, such as "64k"; skips the test where none can be mounted."""
    disk = directory / "disk"
    disk.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "none", str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Nobody can write into the directory; skips the test where that cannot be had even of root."""
    _mount("--bind", str(directory), str(directory))
    try:
        _mount("-o", "remount,bind,ro", str(directory))
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _mount(*arguments: str) -> None:
    result = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"cannot mount: {result.stderr.strip()}")
