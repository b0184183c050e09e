"""The graph for calibration: it also gives what its linear layers read, and its precision is chosen unit by unit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from dskquant.engines.openvino.graph import OpenVINOGraph
from dskquant.engines.openvino.ir import Weight, find_weights
from dskquant.engines.openvino.paged import add_row_input
from dskquant.engines.openvino.plane_rewrite import RESIDUAL_ROWS, SharedPlanes, Source, replace_weights
from dskquant.engines.protocol import LinearUnit, Logits, StepBatch
from dskquant.modes import PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.planes import Float32
from dskquant.scheme import Role, TensorScheme

UNIT_INPUT = "unit_input."
UNIT_ROWS = f"{RESIDUAL_ROWS}."

TensorKey = tuple[str, int]


def find_units(model: ov.Model) -> dict[LinearUnit, ov.Output]:
    """The units of linear layers and the tensor each reads, in the order of execution."""
    names: dict[TensorKey, list[str]] = {}
    inputs: dict[TensorKey, ov.Output] = {}
    for weight in find_weights(model):
        if weight.role is Role.LINEAR:
            tokens = _input_of(weight)
            names.setdefault(_key(tokens), []).append(weight.name)
            inputs[_key(tokens)] = tokens
    return {tuple(names[key]): inputs[key] for key in names}


def add_unit_inputs(model: ov.Model, units: Mapping[LinearUnit, ov.Output]) -> None:
    """Makes the tensors that the units read outputs of `model`."""
    results = []
    for index, tokens in enumerate(units.values()):
        result = ops.result(tokens)
        tokens.get_tensor().add_names({f"{UNIT_INPUT}{index}"})
        results.append(result)
    model.add_results(results)


def use_planes_by_unit(model: ov.Model, parameters: ParameterSet) -> Source:
    """Rewrites a paged model in place to compute with `parameters`, each unit of linear layers with an input of its
    own for the rows that also use the residual plane; returns what must outlive the model.

    Raises StoreError when the set does not cover the weights of the model or has other shapes.
    """
    source = Source(parameters.matrices())
    replace_weights(model, parameters, source, _UnitPlanes(model, source).product)
    return source


class _UnitPlanes:
    def __init__(self, model: ov.Model, source: Source) -> None:
        self._model = model
        self._source = source
        self._units: dict[TensorKey, SharedPlanes] = {}

    def product(self, tokens: ov.Output, name: str, scheme: TensorScheme) -> ov.Node:
        if _key(tokens) not in self._units:
            rows = add_row_input(self._model, f"{UNIT_ROWS}{len(self._units)}")
            self._units[_key(tokens)] = SharedPlanes(self._source, rows)
        return self._units[_key(tokens)].product(tokens, name, replace(scheme, always_residual=False))


class OpenVINOCalibrationGraph(OpenVINOGraph):
    """See `dskquant.engines.protocol.CalibrationGraph`."""

    def __init__(
        self,
        compiled: ov.CompiledModel,
        modes: frozenset[PrecisionMode],
        resident_bytes: int,
        source: Source | None,
        units: tuple[LinearUnit, ...],
    ) -> None:
        super().__init__(compiled, modes, resident_bytes, source)
        self.units = units
        self._takes_rows = source is not None
        self._with_residual: frozenset[LinearUnit] = frozenset()

    def use_residual(self, units: Collection[LinearUnit]) -> None:
        self._with_residual = frozenset(units)

    def run(self, batch: StepBatch) -> Logits:
        every_row = np.arange(len(batch.token_ids), dtype=np.int32)  # its memory is read until the run has ended
        if self._takes_rows:
            for index, unit in enumerate(self.units):
                rows = every_row if unit in self._with_residual else every_row[:0]
                self._request.set_tensor(f"{UNIT_ROWS}{index}", ov.Tensor(rows, shared_memory=True))
        return super().run(batch)

    def unit_inputs(self) -> Iterator[tuple[LinearUnit, Float32]]:
        for index, unit in enumerate(self.units):
            values = self._request.get_tensor(f"{UNIT_INPUT}{index}").data
            yield unit, values.reshape(-1, values.shape[-1])


def _input_of(weight: Weight) -> ov.Output:
    return weight.matmuls[0].input_value(0)


def _key(tokens: ov.Output) -> TensorKey:
    return tokens.get_node().get_name(), tokens.get_index()
