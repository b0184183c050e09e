"""What to quantize of a plain graph, and how: from its operators, and from noise and speed as they are measured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dskquant.errors import EngineError, QuantError
from dskquant.modes import LADDER, REFERENCE, PrecisionMode
from dskquant.parameter_set import Progress
from dskquant.plain.advice import WANTED_SQNR_DB, Advice, Figures, advise
from dskquant.plain.load import PLAIN_ENGINE_NAMES, load_plain_graph
from dskquant.plain.maker import GraphKind, GraphMaker, Int8Method, Recipe, kind_of, open_maker
from dskquant.plain.noise import GraphNoise
from dskquant.plain.protocol import PlainGraph, Tensors, TensorSpec
from dskquant.plain.reference import ALL_THREADS, Reference, ask_reference
from dskquant.plain.samples import DataOptions
from dskquant.plain.sensitivity import GroupNoise, Mixed, find_mixed, measure_groups
from dskquant.plain.speed import median_ms
from dskquant.plain.store import GOLDEN, PlainManifest, graph_files, is_plain_store, read_golden

MIXED = "int8, mixed"


@dataclass(frozen=True, slots=True)
class RecommendOptions:
    """What to measure with, and what is wanted."""

    data: DataOptions | None  # None: the golden inputs of the store
    int8: Int8Method | None = None  # None: what suits the graph
    block_size: int = 32
    wanted_db: float = WANTED_SQNR_DB


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What was measured, and what follows from it."""

    source: str
    kind: GraphKind
    operators: Mapping[str, int]  # the most frequent first
    layers: int  # with constant weights
    data: str
    rows: int
    figures: Sequence[Figures]
    groups: Sequence[GroupNoise]  # of INT8, in the order of execution
    keep_float: Sequence[str]  # layers to leave in float for the wanted SQNR; none: not needed, or of no use
    advice: Advice
    notes: Sequence[str]  # what could not be measured, and why


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    mode: PrecisionMode
    path: Path
    method: str


def recommend(source: Path, options: RecommendOptions, progress: Progress) -> Recommendation:
    """Of an ONNX file, an OpenVINO IR (`.xml`) or the store of a plain graph, whose modes are taken as they are.

    Raises SourceError or StoreError for what cannot be read, EngineError where the graph itself cannot run.
    """
    with TemporaryDirectory(prefix="dskquant-") as directory:
        scratch, notes = Path(directory), list[str]()
        graph_path, given = _given(source)
        maker = open_maker(graph_path, scratch)
        reference = ask_reference(maker.engine, graph_path, lambda specs: _samples(source, options, specs))
        kind = kind_of(maker.operators, maker.layers)
        recipe = Recipe(options.int8 or kind.int8, options.block_size)
        candidates = given or _make_modes(maker, recipe, reference, graph_path, scratch, notes)
        groups, mixed = _look_into(maker, recipe, reference, candidates, options.wanted_db, scratch, progress)
        if mixed is not None:
            candidates.append(_Candidate(MIXED, PrecisionMode.INT8, mixed.path, mixed.method))
        progress("measuring speed", 0, 1)
        figures = _measure(candidates, reference, notes)
        keep_float = mixed.keep_float if mixed else ()
        return Recommendation(
            str(source),
            kind,
            dict(maker.operators.most_common()),
            len(maker.layers),
            options.data.source if options.data else GOLDEN,
            len(reference.samples),
            figures,
            groups,
            keep_float,
            advise(kind, maker.layers, figures, keep_float, options.wanted_db),
            notes,
        )


def _given(source: Path) -> tuple[Path, list[_Candidate]]:
    """The path of FP32, and the modes that are there already."""
    if not is_plain_store(source):
        return source, []
    graphs = PlainManifest.read(source).graphs
    for graph in graphs.values():
        graph.verify(source)
    candidates = [
        _Candidate(mode.value, mode, source / graphs[mode].file, graphs[mode].method)
        for mode in reversed(LADDER)
        if mode in graphs
    ]
    return source / graphs[REFERENCE].file, candidates


def _samples(source: Path, options: RecommendOptions, specs: Sequence[TensorSpec]) -> Sequence[Tensors]:
    if options.data is not None:
        return options.data.samples(specs)
    golden = read_golden(source).inputs
    if PlainManifest.read(source).batch_axis is None:
        return [golden]
    rows = min(len(tensor) for tensor in golden.values())
    return [{name: tensor[row : row + 1] for name, tensor in golden.items()} for row in range(rows)]


def _make_modes(
    maker: GraphMaker, recipe: Recipe, reference: Reference, source: Path, scratch: Path, notes: list[str]
) -> list[_Candidate]:
    candidates = [_Candidate(REFERENCE.value, REFERENCE, source, "as given")]
    for mode in reversed(LADDER):
        path = scratch / f"{mode.value}{maker.suffix}"
        try:
            if mode is not REFERENCE:
                method = maker.make(mode, recipe, reference.samples, path)
                candidates.append(_Candidate(mode.value, mode, path, method))
        except EngineError as error:
            notes.append(f"{mode.value} was not made: {error}")
    return candidates


def _look_into(
    maker: GraphMaker,
    recipe: Recipe,
    reference: Reference,
    candidates: Sequence[_Candidate],
    wanted_db: float,
    scratch: Path,
    progress: Progress,
) -> tuple[Sequence[GroupNoise], Mixed | None]:
    """Where INT8 can be made: the noise of its layers, and a mixed graph where the whole is too noisy."""
    whole = next((each for each in candidates if each.mode is PrecisionMode.INT8), None)
    if whole is None:
        return [], None
    groups = measure_groups(maker, recipe, reference, scratch, progress)
    if reference.noise_of(reference.load(whole.path), whole.name).sqnr_db >= wanted_db:
        return groups, None
    return groups, find_mixed(maker, recipe, reference, groups, wanted_db, scratch / f"mixed{maker.suffix}")


def _measure(candidates: Sequence[_Candidate], reference: Reference, notes: list[str]) -> list[Figures]:
    """All of them on all engines that can, their runs interleaved."""
    graphs: dict[tuple[_Candidate, str], tuple[PlainGraph, GraphNoise]] = {}
    for candidate, engine in itertools.product(candidates, PLAIN_ENGINE_NAMES):
        if isinstance(loaded := _load(candidate, engine, reference), str):
            notes.append(f"{candidate.name} on {engine}: {loaded}")
        else:
            graphs[candidate, engine] = loaded
    times = median_ms({key: graph for key, (graph, _) in graphs.items()}, reference.samples[0])
    return [
        Figures(key[0].name, key[0].mode, key[1], key[0].method, _nbytes(key[0].path), graphs[key][1], ms)
        for key, ms in times.items()
    ]


def _load(candidate: _Candidate, engine: str, reference: Reference) -> tuple[PlainGraph, GraphNoise] | str:
    """The graph with its noise, or why the engine cannot compute it."""
    try:
        graph = load_plain_graph(engine, candidate.path, ALL_THREADS)
        return graph, reference.noise_of(graph, candidate.name)
    except QuantError as error:
        return str(error).splitlines()[0]


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in graph_files(path))
