"""Files that survive a crash: when a function returns, what it wrote is on the disk; otherwise the old content is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, data: bytes, keep_previous: Path | None = None) -> None:
    """Makes `data` the content of `path`; the file that was there, if any, becomes `keep_previous`.

    Whatever happens on the way, each of the two holds an old or a new content, whole. Raises OSError; only when the
    last step fails, the sync of the directory, `path` has the new content all the same.
    """
    make_directory(path.parent)
    aside = _aside(path)
    try:
        with new_file(aside) as file:
            file.write(data)
        if keep_previous is not None:
            _link(path, keep_previous)
        aside.replace(path)
    except OSError:
        with suppress(OSError):  # what failed first is told
            aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _link(path: Path, other: Path) -> None:
    """Makes `other` a second name of the file `path`, if there is one."""
    aside = _aside(other)
    aside.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        aside.hardlink_to(path)
        aside.replace(other)
        aside.unlink(missing_ok=True)  # rename(2) leaves it there when both are names of one file already


def append_line(path: Path, line: bytes) -> None:
    """Adds `line`, which has no newline, to the file; a torn last line, left by a crash, is cut off first."""
    make_directory(path.parent)
    is_new = not path.exists()
    with path.open("a+b", buffering=0) as file:
        end = _end_of_last_line(file)
        file.truncate(end)
        try:
            _write_all(file.fileno(), line + b"\n")
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # the next append cuts it off otherwise
                file.truncate(end)
            raise
    if is_new:
        sync_directory(path.parent)


def _end_of_last_line(file: BinaryIO) -> int:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read(1) in (b"", b"\n"):
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, on the disk when the block ends; its name is so after a `sync_directory`."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def make_directory(path: Path) -> None:
    """Makes the directory and those above it, unless they are there."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in the directory durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_tree(directory: Path) -> None:
    """Makes all files and names below the directory durable."""
    for path in directory.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            _sync(path, os.O_RDONLY)
    sync_directory(directory)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
