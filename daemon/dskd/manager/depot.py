"""The daemon's own copies of the parameter sets it serves: what was dropped somewhere may be gone at the next start.

DEPOT/
  <hash>/         a set with its codes; the name is the SHA-256 of the manifest it came with
    completed     where the daemon derived the codes: the SHA-256 of the manifest it wrote for them
  .incoming-*     a set on its way in
  .outgoing-*     a set on its way out
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import structlog
from safetensors import SafetensorError

from dskd import durable
from dskd.errors import DskdError, FailedPreconditionError, ResourceExhaustedError
from dskd.units import format_bytes
from dskquant import parameter_set, set_writer
from dskquant.errors import StoreError
from dskquant.parameter_set import Codes, ParameterSet
from dskquant.store import MANIFEST

COMPLETED = "completed"
INCOMING = ".incoming-"
OUTGOING = ".outgoing-"
PIECE_BYTES = 4 << 20  # between two looks for a cancellation
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_HASH = re.compile("[0-9a-f]{64}")
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")

IsCancelled = Callable[[], bool]

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


class KeepCancelledError(DskdError):
    """A set is not wanted any more; nothing of it was kept."""

    code = "ABORTED"


class SetDepot:
    """A content-addressed store of parameter sets. Its methods may be called from several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # over the names in the directory and what follows
        self._in_use: Counter[str] = Counter()  # names that are being kept right now
        self._verified: set[str] = set()  # hashes of sets that this process has seen whole

    def keep(self, parameters: ParameterSet, store: Path, is_cancelled: IsCancelled) -> ParameterSet:
        """Copies the set in, unless it is there already; returns the copy, whose hash is that of `parameters`.

        Derived codes are worked out from the weights of `store`. The copy is durable when this returns, and verified
        against the manifest; after any error nothing of it is left. Raises StoreError when `parameters` is damaged or,
        where codes are derived, breaks a rule, ResourceExhaustedError when the disk is full, FailedPreconditionError
        when it cannot be written, and KeepCancelledError.
        """
        aside = f"{INCOMING}{uuid.uuid4().hex}"
        with self._using(parameters.hash, aside), _disk_errors(self._directory):
            if not self._has(parameters.hash):
                self._bring_in(parameters, store, self._directory / aside, is_cancelled)
            return self._read(parameters.hash)

    def open(self, hash: str) -> ParameterSet:  # noqa: A002
        """The kept set, every file of it verified. Raises StoreError when it is not there or damaged."""
        try:
            parameters = self._read(hash)
            parameters.verify()
        except (StoreError, OSError) as error:
            self._verified.discard(hash)
            raise StoreError(str(error)) from error
        self._verified.add(hash)
        return parameters

    def forget_all_but(self, hashes: Collection[str]) -> None:
        """Removes all other sets, and what crashes left; never a set that is being kept right now."""
        try:
            leaving = self._take_out(hashes)
        except OSError as error:
            log.error("parameter sets cannot be removed", path=str(self._directory), reason=str(error))
            return
        for path in leaving:
            _remove(path)

    def forget_leftovers(self) -> None:
        """Removes what a crash left of sets on their way in or out."""
        try:
            with self._lock:
                leaving = [path for path in self._unused() if path.name.startswith((INCOMING, OUTGOING))]
        except OSError as error:
            log.error("leftovers cannot be removed", path=str(self._directory), reason=str(error))
            return
        for path in leaving:
            _remove(path)

    def _unused(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        return [path for path in self._directory.iterdir() if path.name not in self._in_use]

    def _take_out(self, hashes: Collection[str]) -> list[Path]:
        """Renames what shall go, so that a set is never half there under its own name."""
        with self._lock:
            unused = self._unused()
            sets = [path for path in unused if _HASH.fullmatch(path.name) and path.name not in hashes]
            leftovers = [path for path in unused if path.name.startswith((INCOMING, OUTGOING))]
            return [self._rename_out(path) for path in sets] + leftovers

    def _rename_out(self, path: Path) -> Path:
        self._verified.discard(path.name)
        return path.rename(self._directory / f"{OUTGOING}{uuid.uuid4().hex}")

    @contextmanager
    def _using(self, *names: str) -> Iterator[None]:
        with self._lock:
            self._in_use.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._in_use -= Counter(names)

    def _has(self, hash: str) -> bool:  # noqa: A002
        """Whether the set is there and whole; its files are read once in the life of this process."""
        if not (self._directory / hash).is_dir():
            return False
        if hash in self._verified:
            return True
        try:
            self.open(hash)
        except StoreError as error:
            log.error("kept parameter set is damaged: it is replaced", hash=hash, reason=str(error))
            return False
        return True

    def _read(self, hash: str) -> ParameterSet:  # noqa: A002
        if not _HASH.fullmatch(hash):
            raise StoreError(f"{hash!r} is not the hash of a parameter set")
        directory = self._directory / hash
        if not directory.is_dir():
            raise StoreError(f"{directory}: missing")
        completed = directory / COMPLETED
        expected = completed.read_text(encoding="ascii", errors="replace") if completed.exists() else hash
        parameters = parameter_set.read(directory)
        if parameters.hash != expected:
            raise StoreError(f"{directory / MANIFEST}: damaged: its SHA-256 is not {expected}")
        return replace(parameters, hash=hash)

    def _bring_in(self, parameters: ParameterSet, store: Path, aside: Path, is_cancelled: IsCancelled) -> None:
        given, completed = aside / "given", aside / "completed"
        durable.make_directory(self._directory)
        self._require_space(parameters)
        try:
            given.mkdir(parents=True)
            _copy(parameters, given, is_cancelled)
            if parameters.codes is Codes.DERIVED:
                _complete(replace(parameters, directory=given), store, completed, is_cancelled)
            whole = given if parameters.codes is Codes.STORED else completed
            durable.sync_tree(whole)
            self._install(whole, parameters.hash)
        finally:
            _remove(aside)

    def _require_space(self, parameters: ParameterSet) -> None:
        needed, free = _bytes_to_keep(parameters), shutil.disk_usage(self._directory).free
        if needed > free:
            raise ResourceExhaustedError(
                "disk",
                f"keeping the parameter set in {self._directory} needs {format_bytes(needed)}, "
                f"free are {format_bytes(free)}",
            )

    def _install(self, whole: Path, hash: str) -> None:  # noqa: A002
        target = self._directory / hash
        with self._lock:
            if hash in self._verified and target.is_dir():  # another thread was faster
                return
            damaged = [self._rename_out(target)] if target.exists() else []
            whole.rename(target)
            durable.sync_directory(self._directory)
            self._verified.add(hash)
        for path in damaged:
            _remove(path)


def _bytes_to_keep(parameters: ParameterSet) -> int:
    files = sum(_size(parameters.directory / name) for name in (MANIFEST, *parameters.sha256))
    if parameters.codes is Codes.STORED:
        return files
    schemes = parameters.tensors.values()
    codes = sum(scheme.shape[0] * scheme.shape[1] * (1 + scheme.int8_plane) for scheme in schemes)
    return 2 * files + codes


def _size(path: Path) -> int:
    try:
        if not path.is_file():
            raise StoreError(f"{path}: missing")
        return path.stat().st_size
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


def _copy(parameters: ParameterSet, destination: Path, is_cancelled: IsCancelled) -> None:
    """Raises StoreError for the first file that is not the one it should be."""
    for name, expected in {MANIFEST: parameters.hash, **parameters.sha256}.items():
        path, digest = parameters.directory / name, hashlib.sha256()
        with durable.new_file(destination / name) as file:
            for piece in _pieces(path):
                _stop_if(is_cancelled)
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != expected:
            raise StoreError(f"{path}: damaged: its SHA-256 is not {expected}")


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


def _complete(parameters: ParameterSet, store: Path, destination: Path, is_cancelled: IsCancelled) -> None:
    set_writer.complete(parameters, store, destination, lambda *_: _stop_if(is_cancelled))
    written = parameter_set.read(destination).hash
    (destination / COMPLETED).write_text(written, encoding="ascii")


def _stop_if(is_cancelled: IsCancelled) -> None:
    if is_cancelled():
        raise KeepCancelledError("the parameter set is not wanted any more: it was not kept")


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    """Tells clients what the operating system says about the depot."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if _errno(error) in DISK_FULL:
            raise ResourceExhaustedError("disk", f"no space in {directory} to keep the parameter set") from error
        raise FailedPreconditionError("state_dir", f"the parameter set cannot be kept: {error}") from error


def _errno(error: OSError | SafetensorError) -> int | None:
    """The library that writes tensors tells the number in its message alone."""
    if isinstance(error, OSError):
        return error.errno
    match = _RUST_ERRNO.search(str(error))
    return int(match[1]) if match else None


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        log.error("parameter set cannot be removed", path=str(path))
