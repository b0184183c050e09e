"""From a store and a text to a parameter set, or to nothing: a set is written aside and renamed when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dskquant.aside import written_aside
from dskquant.calibration.layers import Method, quantize_unit
from dskquant.calibration.moments import passes, second_moments
from dskquant.calibration.noise import Reference
from dskquant.calibration.selection import (
    Sensitivity,
    residual_bits,
    with_residual,
    within_budget,
    within_noise,
)
from dskquant.calibration.windows import CalibrationText, Window, read_text
from dskquant.engines.protocol import CalibrationGraph, CompileOptions, Engine, LinearUnit, WeightSource
from dskquant.errors import QuantError, SchemeError, StoreError
from dskquant.forward import blocks_for
from dskquant.modes import PrecisionMode
from dskquant.parameter_set import Codes, ParameterSet, Progress
from dskquant.planes import Float32, group_length
from dskquant.scheme import Role, Scheme, TensorScheme
from dskquant.set_layout import planes_of
from dskquant.set_writer import SetWriter, quantize_tensor
from dskquant.store import StoreManifest

EXACT = CompileOptions(kv_precision="f32")
SERVED = CompileOptions()
"""What `dskquant compare` and the daemon run unless told otherwise."""

SENSITIVITY_TOKENS = 512
"""Calibration tokens that every unit is measured on."""

ANSWERS = ".answers"
"""Scratch file of the reference in the directory being written."""

CODED = ".coded"
"""Scratch directory there, for what a set of scales alone is measured with."""


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How to calibrate."""

    method: Method = Method.GPTQ
    scheme: Scheme = field(default_factory=Scheme)
    tokens: int = 16384  # to calibrate on, at most
    seed: int = 0  # chooses them
    budget: float | None = None  # bits per weight of INT4, over everything
    max_kl: float | None = None  # nats per token of INT4, on held-out text
    codes: Codes = Codes.STORED

    def __post_init__(self) -> None:
        if self.codes is Codes.DERIVED and self.method is not Method.SEARCH:
            raise QuantError(
                "--scales-only: the codes of error feedback do not follow from scales; use --method search"
            )
        if self.budget is not None and self.max_kl is not None:
            raise QuantError("--budget and --max-kl: give one of them")

    @property
    def mixed(self) -> bool:
        """Whether some layers shall always get the residual plane."""
        return self.budget is not None or self.max_kl is not None


@dataclass(frozen=True, slots=True)
class Calibration:
    """A finished set, and what was measured on the way."""

    parameters: ParameterSet
    sensitivities: tuple[Sensitivity, ...]  # in the order of execution


def calibrate(
    store: Path, text: Path, destination: Path, options: CalibrationOptions, engine: Engine, progress: Progress
) -> Calibration:
    """Writes a parameter set for `store`, calibrated on the file `text`, into the new directory `destination`.

    Takes the memory of the FP32 graph, then of the quantized one. Raises QuantError for a text, scheme, budget or noise
    that cannot be used, StoreError when `destination` exists; whatever happens, it is either complete or not there.
    """
    destination = destination.resolve()
    if destination.exists():
        raise StoreError(f"{destination} exists already: remove it or choose another name")
    with written_aside(destination) as directory:
        job = _Job(store, read_text(store, text, options.tokens, options.seed), directory, options, engine, progress)
        made = job.run()
    return replace(made, parameters=replace(made.parameters, directory=destination))


class _Job:
    def __init__(
        self,
        store: Path,
        text: CalibrationText,
        directory: Path,
        options: CalibrationOptions,
        engine: Engine,
        progress: Progress,
    ) -> None:
        self._store = store
        self._manifest = StoreManifest.read(store)
        self._text = text
        self._directory = directory
        self._options = options
        self._engine = engine
        self._progress = progress
        self._weights = {weight.name: weight for weight in engine.weights(store)}
        self._schemes = {name: self._scheme_of(weight) for name, weight in self._weights.items()}

    def run(self) -> Calibration:
        if self._options.budget is not None:
            within_budget((), self._schemes, self._manifest, self._options.budget)  # refused before the work is done
        measured = self._quantize()
        held_out, known = self._references()
        with self._compiled(SERVED, measured) as graph:
            sensitivities = self._sensitivities(graph, known) if known else ()
            self._progress("measuring on held-out text", 0, 1)
            chosen = self._choose(sensitivities, graph, held_out)
            expected = {
                PrecisionMode.INT4: held_out.mean_kl(graph, chosen),
                PrecisionMode.INT8: held_out.mean_kl(graph, graph.units),
            }
        self._progress("measuring on held-out text", 1, 1)
        made = replace(
            self._without_codes(measured) if self._options.codes is Codes.DERIVED else measured,
            tensors=with_residual(self._schemes, chosen),
            expected_kl=expected,
            provenance=self._provenance(sensitivities),
        )
        return Calibration(made.write_manifest(), sensitivities)

    def _scheme_of(self, weight: WeightSource) -> TensorScheme:
        scheme = self._options.scheme.for_tensor(weight.name, weight.role, weight.shape)
        try:
            group_length(weight.shape[1], scheme.group_size)
        except SchemeError as error:
            raise SchemeError(f"{weight.name}: {error}") from error
        return scheme

    def _quantize(self) -> ParameterSet:
        """The set with its codes, all layers in plain INT4 while it serves in INT4."""
        directory = self._directory / CODED if self._options.codes is Codes.DERIVED else self._directory
        directory.mkdir(exist_ok=True)
        writer = SetWriter(directory)
        for weight in self._weights.values():
            if weight.role is not Role.LINEAR:
                writer.add(quantize_tensor(weight, self._schemes[weight.name]))
        with self._compiled(EXACT, None) as graph:
            for unit, moments in self._moments(graph):
                weights = [self._weights[name] for name in unit]
                writer.add(quantize_unit(weights, self._schemes, moments, self._options.method))
        writer.flush()
        manifest, tensors = self._manifest, with_residual(self._schemes, ())
        made = ParameterSet(directory, manifest.model_id, manifest.weights_sha256, tensors, writer.sha256)
        return made.write_manifest()

    def _moments(self, graph: CalibrationGraph) -> Iterator[tuple[LinearUnit, Float32]]:
        columns = {unit: self._weights[unit[0]].shape[1] for unit in graph.units}
        diagonal = self._options.method is Method.SEARCH
        done = 0
        for units in [list(columns)] if diagonal else passes(columns):
            moments = second_moments(
                graph,
                self._text.calibration,
                units,
                self._engine.block_size,
                self._progress,
                diagonal=diagonal,
            )
            for unit in units:
                self._progress(f"quantizing {unit[0]}", done, len(columns))
                yield unit, moments.pop(unit)
                done += 1

    def _without_codes(self, measured: ParameterSet) -> ParameterSet:
        writer = SetWriter(self._directory)
        matrices = measured.matrices()
        for name, scheme in measured.tensors.items():
            for plane in planes_of(name, scheme).values():
                scales, zero_points = matrices.grid(plane)
                writer.add({plane.scales: scales.copy(), plane.zero_points: zero_points.copy()})
        writer.flush()
        shutil.rmtree(measured.directory)
        return replace(measured, directory=self._directory, sha256=writer.sha256, codes=Codes.DERIVED)

    def _references(self) -> tuple[Reference, Reference | None]:
        """What the reference answers on the held-out text, and, if layers are chosen, on a part of the other."""
        windows = self._text.calibration
        part = windows[: max(1, SENSITIVITY_TOKENS // len(windows[0]))]
        self._progress("asking the reference", 0, 1)
        with self._compiled(SERVED, None) as graph:
            held_out = self._reference(self._text.held_out, graph)
            return held_out, self._reference(part, graph) if self._options.mixed else None

    def _reference(self, windows: Sequence[Window], graph: CalibrationGraph) -> Reference:
        scratch = self._directory / ANSWERS
        try:
            return Reference(windows, graph, scratch, self._engine.block_size)
        finally:
            scratch.unlink()  # it stays mapped

    def _sensitivities(self, graph: CalibrationGraph, known: Reference) -> tuple[Sensitivity, ...]:
        """How much the divergence grows when one unit alone computes in INT4, all others in INT8."""
        every = frozenset(graph.units)
        least = known.mean_kl(graph, every)
        measured = []
        for done, unit in enumerate(graph.units):
            self._progress("measuring sensitivities", done, len(graph.units))
            kl = known.mean_kl(graph, every - {unit}) - least
            measured.append(Sensitivity(unit, kl, residual_bits(unit, self._schemes)))
        return tuple(measured)

    def _choose(
        self, sensitivities: Sequence[Sensitivity], graph: CalibrationGraph, held_out: Reference
    ) -> Sequence[LinearUnit]:
        options = self._options
        if options.budget is not None:
            return within_budget(sensitivities, self._schemes, self._manifest, options.budget)
        if options.max_kl is not None:
            return within_noise(sensitivities, partial(held_out.mean_kl, graph), options.max_kl)
        return ()

    @contextmanager
    def _compiled(self, options: CompileOptions, parameters: ParameterSet | None) -> Iterator[CalibrationGraph]:
        """A graph with a cache for one window, closed at the end."""
        graph = self._engine.compile_for_calibration(self._store, options, parameters)
        try:
            window = len(self._text.held_out[0])
            graph.bind(graph.allocate_cache(blocks_for(window, self._engine.block_size)))
            yield graph
        finally:
            graph.close()

    def _provenance(self, sensitivities: Sequence[Sensitivity]) -> dict[str, Any]:
        options, text = self._options, self._text
        provenance: dict[str, Any] = {
            "method": options.method.value,
            "seed": options.seed,
            "tokens": text.tokens,
            "text_sha256": text.sha256,
        }
        if options.budget is not None:
            provenance["budget"] = options.budget
        if options.max_kl is not None:
            provenance["max_kl"] = options.max_kl
        if sensitivities:
            provenance["sensitivities"] = {" ".join(item.unit): item.kl for item in sensitivities}
        return provenance
