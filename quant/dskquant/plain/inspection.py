"""What is told of the store of a plain graph; nothing of it is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dskquant.errors import StoreError
from dskquant.inspection import ListedFile
from dskquant.plain.store import PlainManifest, StoredGraph, read_golden


@dataclass(frozen=True, slots=True)
class PlainReport:
    """The store of a plain graph."""

    path: str
    manifest: PlainManifest
    files: list[ListedFile]  # one for each mode; an IR counts as one
    golden_problem: str | None  # what is wrong with the golden inputs; None: nothing

    @property
    def problems(self) -> list[str]:
        """What is missing, and what was found damaged."""
        states = {file.name: "is missing" if file.bytes is None else "is damaged" for file in self.files}
        wrong = [file.name for file in self.files if file.bytes is None or file.whole is False]
        found = [f"{name} {states[name]}" for name in wrong]
        return [*found, self.golden_problem] if self.golden_problem else found


def inspect_plain(store: Path, verify: bool) -> PlainReport:
    """Raises StoreError where the manifest cannot be read; `verify` reads every graph too."""
    manifest = PlainManifest.read(store)
    files = [_listed(store, graph, verify) for graph in manifest.graphs.values()]
    return PlainReport(str(store), manifest, files, _golden_problem(store))


def _listed(store: Path, graph: StoredGraph, verify: bool) -> ListedFile:
    paths = graph.files(store)
    if not all(path.is_file() for path in paths):
        return ListedFile(graph.file, None, graph.sha256, None)
    size = sum(path.stat().st_size for path in paths)
    return ListedFile(graph.file, size, graph.sha256, _is_whole(store, graph) if verify else None)


def _is_whole(store: Path, graph: StoredGraph) -> bool:
    try:
        graph.verify(store)
    except StoreError:
        return False
    return True


def _golden_problem(store: Path) -> str | None:
    try:
        read_golden(store)
    except StoreError as error:
        return str(error)
    return None
