"""Directories that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dskquant.errors import StoreError
from dskquant.store import MANIFEST


def check_destination(store: Path, replace: bool) -> None:
    """Raises StoreError unless `store` may be written: it is new, or a store that shall be replaced."""
    if not store.exists():
        return
    if not replace:
        raise StoreError(f"{store} exists already; --force replaces it")
    if not (store / MANIFEST).is_file():
        raise StoreError(f"{store} is not a model store (no {MANIFEST}): it will not be replaced")


@contextmanager
def written_aside(destination: Path) -> Iterator[Path]:
    """A directory beside `destination` that becomes it when the block ends well, and is removed when it does not."""
    partial = destination.parent / f".{destination.name}.partial-{os.getpid()}"
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process of the same number, as in containers
    partial.mkdir()
    try:
        yield partial
        _open_to_readers(partial)
        _sync(partial)
        _put_in_place(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _open_to_readers(partial: Path) -> None:
    """Gives all files the permissions of a new file: safetensors and temporary ones would be their owner's alone, and
    the daemon often runs as somebody else.
    """
    mode = stat.S_IMODE((partial / MANIFEST).stat().st_mode)
    for path in partial.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _put_in_place(partial: Path, destination: Path) -> None:
    if not destination.exists():
        partial.rename(destination)
        _sync_directory(destination.parent)
        return
    old = destination.parent / f".{destination.name}.old-{os.getpid()}"
    shutil.rmtree(old, ignore_errors=True)
    destination.rename(old)
    try:
        partial.rename(destination)
    except BaseException:  # Ctrl-C too
        if not destination.exists():
            old.rename(destination)
        raise
    _sync_directory(destination.parent)
    shutil.rmtree(old)


def _sync(directory: Path) -> None:
    """Makes everything below `directory` durable, so that the rename cannot be seen before the contents."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_directory(path)
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
