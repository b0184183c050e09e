"""Where the generations of a plain graph come from: its store, and the other stores that were applied to it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from dskd import durable
from dskd.errors import FailedPreconditionError
from dskd.manager.depot import KeepCancelledError
from dskd.manager.state_file import KeptGeneration
from dskd.manager.types import SetReference
from dskd.plain.generation import PlainGeneration, PlainSet
from dskquant.errors import StoreError
from dskquant.plain.store import GOLDEN
from dskquant.scheme import LayerRule
from dskquant.store import MANIFEST

INCOMING = ".incoming-"

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


class PlainCatalogue:
    """Makes generations. Everything here reads files, and belongs into worker threads.

    A store that is applied is copied into `depot`, a directory for each under the digest of its manifest: where it
    came from may be gone at the next start.
    """

    def __init__(self, store: Path, depot: Path, engine: str) -> None:
        """Raises StoreError when the model store is damaged."""
        self._depot = depot
        self._engine = engine
        self.default = PlainSet.read(store)
        _verify(self.default, lambda: None)

    def forget_leftovers(self) -> None:
        """Removes what a crash left of stores on their way in."""
        for path in self._depot.glob(f"{INCOMING}*"):
            shutil.rmtree(path, ignore_errors=True)

    def generation(self, number: int, parameters: PlainSet, layers: tuple[LayerRule, ...]) -> PlainGeneration:
        if layers:
            raise FailedPreconditionError("layers", "a plain graph has no layers that take rules; convert it anew")
        return PlainGeneration.of(number, parameters, self._engine)

    def find(self, reference: SetReference, before_piece: Callable[[], None]) -> PlainSet:
        """The store that `reference` names, its digests checked, where it lies.

        Raises StoreError, FailedPreconditionError when it is not the one whose digest was given or of another model.
        """
        found = self.default if reference.path is None else PlainSet.read(_directory_of(reference.path))
        if reference.sha256 and found.hash != reference.sha256:
            raise FailedPreconditionError(
                "params.sha256",
                f"the manifest of {found.directory} has the SHA-256 {found.hash}, not {reference.sha256}",
            )
        self._require_same_model(found)
        _verify(found, before_piece)
        return found

    def keep(self, found: PlainSet, is_cancelled: Callable[[], bool]) -> PlainSet:
        """A copy of the daemon's own; the model's own store stays where it is."""
        if found.hash == self.default.hash:
            return found
        kept = self._depot / found.hash
        if not kept.is_dir():
            try:
                self._copy(found, kept, is_cancelled)
            except OSError as error:
                raise FailedPreconditionError("state_dir", f"the store cannot be kept: {error}") from error
        return self._open(found.hash)

    def reopen(self, kept: KeptGeneration) -> PlainGeneration:
        """A generation of before. Raises StoreError when its store is gone or damaged."""
        is_default = kept.parameter_set == self.default.hash
        return self.generation(kept.number, self.default if is_default else self._open(kept.parameter_set), ())

    def forget_all_but(self, kept: Iterable[KeptGeneration], others: frozenset[str]) -> None:
        """Removes the stores that no generation of `kept` needs and that are not among `others`."""
        needed = others | {generation.parameter_set for generation in kept}
        for path in self._depot.iterdir() if self._depot.is_dir() else ():
            if path.name not in needed and not path.name.startswith(INCOMING):
                shutil.rmtree(path, ignore_errors=True)

    def _open(self, set_hash: str) -> PlainSet:
        found = PlainSet.read(self._depot / set_hash)
        if found.hash != set_hash:
            raise StoreError(f"{found.directory / MANIFEST}: damaged: its SHA-256 is not {set_hash}")
        self._require_same_model(found)
        _verify(found, lambda: None)
        return found

    def _copy(self, found: PlainSet, kept: Path, is_cancelled: Callable[[], bool]) -> None:
        """Copies aside and renames; after any error nothing of it is left."""
        aside = self._depot / f"{INCOMING}{uuid.uuid4().hex}"
        durable.make_directory(self._depot)
        try:
            aside.mkdir()
            for path in _files(found):
                if is_cancelled():
                    raise KeepCancelledError("the store is not wanted any more: it was not kept")
                shutil.copyfile(path, aside / path.name)
            durable.sync_tree(aside)
            os.replace(aside, kept)  # noqa: PTH105  # Path.replace is the same; this says what is meant
            durable.sync_directory(self._depot)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _require_same_model(self, found: PlainSet) -> None:
        ours, theirs = self.default.manifest, found.manifest
        if theirs.source_sha256 != ours.source_sha256:
            raise StoreError(f"{found.directory}: made of another graph than {self.default.directory}")
        if (theirs.inputs, theirs.outputs, theirs.batch_axis) != (ours.inputs, ours.outputs, ours.batch_axis):
            raise StoreError(f"{found.directory}: has other inputs or outputs than {self.default.directory}")


def _directory_of(path: Path) -> Path:
    """A store may be named by its manifest, as a parameter set may."""
    return path.parent if path.name == MANIFEST else path


def _files(found: PlainSet) -> list[Path]:
    graphs = [path for graph in found.manifest.graphs.values() for path in graph.files(found.directory)]
    return [found.directory / MANIFEST, found.directory / GOLDEN, *graphs]


def _verify(found: PlainSet, before_piece: Callable[[], None]) -> None:
    for graph in found.manifest.graphs.values():
        before_piece()
        graph.verify(found.directory)
