"""Looks at the watched directory, without waiting for anything: FIFOs, devices and half-written files included."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

from dskd import quant_config
from dskd.units import format_bytes
from dskd.watch.lease import is_being_written

SUFFIX = ".toml"
HIDDEN = (".", "#")
"""Names that begin so are of editors and of tools: swap files, lock links, the `..data` of Kubernetes."""

KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

TOO_LARGE = f"has more than {format_bytes(quant_config.MAX_BYTES)}"


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as one look found it: its text, or why it has none."""

    sha256: str = ""  # of its content
    text: str = ""
    problem: str = ""
    is_being_written: bool = False

    @classmethod
    def of(cls, text: str) -> FileState:
        return cls(hashlib.sha256(text.encode("utf-8")).hexdigest(), text)

    @property
    def identity(self) -> Hashable:
        """The same for the same content, whatever the time stamps say."""
        return self.sha256, self.problem


def read_directory(directory: Path) -> dict[str, FileState]:
    """The drop-ins by name. Raises OSError when there is no such directory or it cannot be read."""
    states = {path.name: read_file(path) for path in directory.iterdir() if is_drop_in(path.name)}
    return {name: state for name, state in states.items() if state is not None}


def is_drop_in(name: str) -> bool:
    return name.endswith(SUFFIX) and not name.startswith(HIDDEN)


def read_file(path: Path) -> FileState | None:
    """The state of the file, links followed; None when it has gone meanwhile."""
    try:
        return _read(path)
    except FileNotFoundError:
        return FileState(problem="is a link to nothing") if path.is_symlink() else None
    except OSError as error:
        return FileState(problem=f"cannot be read: {error.strerror}")


def _read(path: Path) -> FileState:
    _require_regular(path.stat().st_mode)  # before opening: that wakes the writer of a FIFO, and may start a device
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor).st_mode)  # it may have become another one between the two calls
        content = _read_at_most(descriptor, quant_config.MAX_BYTES + 1)
        written = is_being_written(descriptor)
    finally:
        os.close(descriptor)
    digest = hashlib.sha256(content).hexdigest()
    if len(content) > quant_config.MAX_BYTES:
        return FileState(digest, problem=TOO_LARGE, is_being_written=written)
    try:
        return FileState(digest, content.decode("utf-8"), is_being_written=written)
    except UnicodeDecodeError as error:
        return FileState(digest, problem=f"is not UTF-8: byte {error.start}", is_being_written=written)


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in KINDS if is_kind(mode)), "no file")
        raise OSError(0, f"it is {kind}")


def _read_at_most(descriptor: int, limit: int) -> bytes:
    pieces = []
    while limit > 0 and (piece := os.read(descriptor, limit)):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


def set_fingerprint(path: Path) -> Hashable:
    """Changes when a parameter set (its directory, or a file in that) is put there, completed or replaced.

    Made of names, sizes, times and inodes: the files themselves, which may be large, are not read.
    """
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
        with os.scandir(path if is_directory else path.parent) as entries:
            return tuple(sorted((entry.name, *_stamp(entry)) for entry in entries))
    except OSError as error:
        return error.errno


def _stamp(entry: os.DirEntry[str]) -> tuple[int, ...]:
    try:
        status = entry.stat()
    except OSError:  # a dangling link, or gone meanwhile
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ino
