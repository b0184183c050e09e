"""Generations of plain graphs: the store that serves, and how its graphs are loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dskd.manager.proof import ratio_of_db
from dskquant.modes import LADDER, PrecisionMode
from dskquant.plain.store import PlainManifest
from dskquant.scheme import LayerRule
from dskquant.store import MANIFEST, file_sha256

LIVE_MARGIN = 2.0
"""Live inputs are not those that the noise was measured on: they may be this much noisier with nothing being wrong."""


def modes_of(manifest: PlainManifest) -> str:
    """The modes of a store in words, the least exact first."""
    return ", ".join(mode.value for mode in LADDER if mode in manifest.graphs)


@dataclass(frozen=True, slots=True)
class PlainSet:
    """A plain store as a parameter set: its graphs are what its modes compute with."""

    directory: Path
    manifest: PlainManifest
    hash: str  # hex SHA-256 of the manifest file, which holds the digests of the graphs
    expected_kl: Mapping[PrecisionMode, float] = field(default_factory=dict)  # noise-to-signal ratio by mode

    @classmethod
    def read(cls, directory: Path) -> PlainSet:
        """Raises StoreError when the manifest is missing or damaged; the graphs are not read."""
        manifest = PlainManifest.read(directory)
        expected = {
            mode: LIVE_MARGIN * ratio_of_db(graph.noise.sqnr_db)
            for mode, graph in manifest.graphs.items()
            if graph.noise is not None
        }
        return cls(directory, manifest, file_sha256(directory / MANIFEST), expected)


@dataclass(frozen=True, slots=True)
class PlainGeneration:
    """What exactly serves."""

    number: int
    hash: str  # hex SHA-256 over all that decides what the graphs compute
    parameters: PlainSet
    layers: tuple[LayerRule, ...] = ()

    @classmethod
    def of(cls, number: int, parameters: PlainSet, engine: str) -> PlainGeneration:
        text = json.dumps({"parameters": parameters.hash, "engine": engine}, sort_keys=True)
        return cls(number, hashlib.sha256(text.encode()).hexdigest(), parameters)
