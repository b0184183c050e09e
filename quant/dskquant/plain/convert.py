"""From a graph to a store of its precision modes, each measured against FP32 before it may serve."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import NDArray

from dskquant.aside import check_destination, written_aside
from dskquant.errors import EngineError, SourceError
from dskquant.modes import LADDER, REFERENCE, PrecisionMode
from dskquant.parameter_set import Progress
from dskquant.plain.maker import GraphMaker, Int8Method, Layer, Recipe, kind_of, open_maker
from dskquant.plain.measure import find_batch_axis
from dskquant.plain.noise import GraphNoise
from dskquant.plain.protocol import TensorSpec
from dskquant.plain.reference import Reference, ask_reference
from dskquant.plain.samples import DataOptions, rows_of
from dskquant.plain.store import CalibrationData, PlainGolden, PlainManifest, StoredGraph, graph_files, write_golden
from dskquant.store import files_sha256

GOLDEN_ROWS = 4
LEAST_SQNR_DB = 10.0
RANDOM_NOTE = (
    "calibrated and measured on random inputs: the figures say little about real ones, and so do the ranges of INT8"
)


@dataclass(frozen=True, slots=True)
class PlainOptions:
    """How to convert a plain graph."""

    data: DataOptions
    modes: tuple[PrecisionMode, ...] | None = None  # None: all that can be made
    int8: Int8Method | None = None  # None: what suits the graph
    block_size: int = 32  # weights of INT4 that share a scale
    keep_float: tuple[str, ...] = ()  # names of layers, or patterns, that INT8 and INT4 leave in float
    min_sqnr_db: float = LEAST_SQNR_DB  # noisier modes are not made
    name: str | None = None  # None: the name of the source
    replace: bool = False


@dataclass(frozen=True, slots=True)
class PlainConversion:
    """A finished store, and what its user should know of it."""

    manifest: PlainManifest
    notes: tuple[str, ...]


def convert_plain(source: Path, store: Path, options: PlainOptions, progress: Progress) -> PlainConversion:
    """Makes a store of the graph at `source`, an ONNX file or an OpenVINO IR (`.xml`).

    Raises SourceError for a graph or data that cannot be used, EngineError for a mode that was asked for and cannot be
    made, StoreError when `store` exists already; whatever happens, `store` is either complete or as it was.
    """
    store = store.resolve()
    check_destination(store, options.replace)
    with TemporaryDirectory(prefix="dskquant-") as scratch, written_aside(store) as partial:
        maker = open_maker(source, Path(scratch))
        path = partial / f"{REFERENCE.value}{maker.suffix}"
        maker.copy(path)
        reference = ask_reference(maker.engine, source, options.data.samples)
        batch_axis = find_batch_axis(reference.graph, reference.samples, reference.answers)
        write_golden(partial, _golden(reference, batch_axis))
        graphs = {REFERENCE: _stored(path, "as given", None)}
        made, notes = _make_modes(maker, partial, reference, options, progress)
        manifest = PlainManifest(
            options.name or source.stem,
            files_sha256(graph_files(source)),
            batch_axis,
            reference.graph.inputs,
            tuple(map(_as_answered, reference.graph.outputs, reference.answers[0].values())),
            graphs | made,
            CalibrationData(options.data.source, len(reference.samples)),
        )
        manifest.write(partial)
    return PlainConversion(manifest, ((RANDOM_NOTE,) if manifest.calibration.is_random else ()) + notes)


def _as_answered(spec: TensorSpec, answer: NDArray[Any]) -> TensorSpec:
    """ONNX Runtime tells an output of unknown rank as a scalar."""
    return spec if len(spec.shape) == answer.ndim else TensorSpec(spec.name, spec.dtype, (None,) * answer.ndim)


def recipe_of(maker: GraphMaker, options: PlainOptions) -> Recipe:
    method = options.int8 or kind_of(maker.operators, maker.layers).int8
    return Recipe(method, options.block_size, _kept_layers(maker.layers, options.keep_float))


def _make_modes(
    maker: GraphMaker, directory: Path, reference: Reference, options: PlainOptions, progress: Progress
) -> tuple[dict[PrecisionMode, StoredGraph], tuple[str, ...]]:
    """What was made, and a note for each mode that was not, unless it was asked for."""
    wanted = [mode for mode in reversed(LADDER) if mode is not REFERENCE and mode in (options.modes or LADDER)]
    recipe, made, notes = recipe_of(maker, options), {}, []
    for number, mode in enumerate(wanted):
        progress(f"making {mode.value}", number, len(wanted))
        try:
            made[mode] = _make(mode, maker, recipe, directory, reference, options.min_sqnr_db)
        except EngineError as error:
            if options.modes is not None:
                raise EngineError(f"{mode.value}: {error}") from error
            notes.append(f"{mode.value} was not made: {error}")
            _remove(directory, mode)
    progress("measured", len(wanted), len(wanted))
    return made, tuple(notes)


def _make(
    mode: PrecisionMode,
    maker: GraphMaker,
    recipe: Recipe,
    directory: Path,
    reference: Reference,
    min_sqnr_db: float,
) -> StoredGraph:
    path = directory / f"{mode.value}{maker.suffix}"
    method = maker.make(mode, recipe, reference.samples, path)
    noise = reference.noise_of(reference.load(path), path.name)
    if noise.sqnr_db < min_sqnr_db:
        raise EngineError(f"too noisy: {noise.sqnr_db:.1f} dB on the data, where --min-sqnr asks for {min_sqnr_db:g}")
    return _stored(path, method, noise)


def _remove(directory: Path, mode: PrecisionMode) -> None:
    for path in directory.glob(f"{mode.value}.*"):
        path.unlink()


def _stored(path: Path, method: str, noise: GraphNoise | None) -> StoredGraph:
    files = graph_files(path)
    return StoredGraph(path.name, files_sha256(files), sum(file.stat().st_size for file in files), method, noise)


def _golden(reference: Reference, batch_axis: int | None) -> PlainGolden:
    """A few rows in one run where there can be several, else one sample."""
    if batch_axis is None:
        return PlainGolden(reference.samples[0], reference.answers[0])
    inputs = rows_of(reference.samples[:GOLDEN_ROWS])
    return PlainGolden(inputs, reference.graph.run(inputs))


def _kept_layers(layers: Sequence[Layer], patterns: Sequence[str]) -> frozenset[str]:
    return frozenset(name for pattern in patterns for name in _matching(layers, pattern))


def _matching(layers: Sequence[Layer], pattern: str) -> Iterator[str]:
    found = [layer.name for layer in layers if layer.name == pattern or fnmatch.fnmatchcase(layer.name, pattern)]
    if not found:
        names = [layer.name for layer in layers]
        known = f"; there are {', '.join(names[:5])} and so on" if names else "; there are none"
        raise SourceError(f"no layer to keep in float matches {pattern!r}{known}")
    yield from found
