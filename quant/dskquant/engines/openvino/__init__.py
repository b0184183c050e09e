"""The OpenVINO CPU engine. The only package that imports openvino."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import openvino as ov

from dskquant import parameter_set
from dskquant.engines.openvino.core import CORE
from dskquant.engines.openvino.graph import BLOCK_SIZE, OpenVINOGraph
from dskquant.engines.openvino.ir import find_weights, read_ir
from dskquant.engines.openvino.observe import (
    OpenVINOCalibrationGraph,
    add_unit_inputs,
    find_units,
    use_planes_by_unit,
)
from dskquant.engines.openvino.paged import keep_wanted_logits, to_paged
from dskquant.engines.openvino.plane_rewrite import use_planes
from dskquant.engines.protocol import CompileOptions, WeightSource, graph_key
from dskquant.errors import EngineError
from dskquant.modes import QUANTIZED, PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.store import DEFAULT_PARAMETER_SET, StoreManifest

WORKSPACE_BYTES = 256 << 20
"""Room for activations and for what the compiler needs beside the weights."""


class OpenVINOEngine:
    """Makes paged graphs for the CPU plugin of OpenVINO."""

    name = "openvino"
    block_size = BLOCK_SIZE

    def __init__(self) -> None:
        self._paged: dict[Path, ov.Model] = {}  # of what was compiled for quantized modes

    def weights(self, store: Path) -> Sequence[WeightSource]:
        return find_weights(read_ir(store))

    def compile(
        self,
        store: Path,
        modes: Collection[PrecisionMode],
        options: CompileOptions,
        parameters: ParameterSet | None = None,
    ) -> OpenVINOGraph:
        modes = frozenset(modes)
        if not modes or modes - options.graph_key(next(iter(modes))):
            raise ValueError(f"no single graph serves {sorted(mode.value for mode in modes)}")
        manifest = StoreManifest.read(store)
        served = options.graph_key(next(iter(modes)))
        source = None
        if served <= QUANTIZED:
            model = self._paged_once(store, manifest.num_layers)
            source = use_planes(model, parameters or parameter_set.read(store / DEFAULT_PARAMETER_SET), served)
        else:
            model = _read_paged(store, manifest.num_layers)
        compiled = _compile(store, model, modes, options)
        return OpenVINOGraph(compiled, served, _weight_bytes(manifest, served), source)

    def compile_for_calibration(
        self, store: Path, options: CompileOptions, parameters: ParameterSet | None = None
    ) -> OpenVINOCalibrationGraph:
        manifest = StoreManifest.read(store)
        modes = graph_key(PrecisionMode.INT4 if parameters else PrecisionMode.FP32)
        model = _read_paged(store, manifest.num_layers)
        units = find_units(model)
        source = use_planes_by_unit(model, parameters) if parameters else None
        add_unit_inputs(model, units)
        compiled = _compile(store, model, modes, options)
        return OpenVINOCalibrationGraph(compiled, modes, _weight_bytes(manifest, modes), source, tuple(units))

    def estimate_bytes(self, store: Path, modes: Collection[PrecisionMode], options: CompileOptions) -> int:
        return _weight_bytes(StoreManifest.read(store), frozenset(modes)) + WORKSPACE_BYTES

    def _paged_once(self, store: Path, num_layers: int) -> ov.Model:
        """A copy of the paged model of `store`: making it stops all Python threads for a tenth of a second and more.

        What is kept holds no memory but that of the structure, for the planes take the place of the weights.
        """
        if store not in self._paged:
            self._paged[store] = _read_paged(store, num_layers)
        return self._paged[store].clone()


def _read_paged(store: Path, num_layers: int) -> ov.Model:
    model = read_ir(store)
    to_paged(model, num_layers)
    keep_wanted_logits(model)
    return model


def _compile(
    store: Path, model: ov.Model, modes: frozenset[PrecisionMode], options: CompileOptions
) -> ov.CompiledModel:
    try:
        return CORE.compile_model(model, "CPU", compile_properties(modes, options))
    except RuntimeError as error:
        raise EngineError(f"{store}: OpenVINO cannot compile the model: {error}") from error


def compile_properties(modes: frozenset[PrecisionMode], options: CompileOptions) -> dict[str, Any]:
    """Properties of the CPU plugin for a graph of `modes`."""
    quantized = modes <= QUANTIZED
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": options.threads or len(os.sched_getaffinity(0)),
        "INFERENCE_PRECISION_HINT": _half_type() if PrecisionMode.FP16 in modes else "f32",
        "KV_CACHE_PRECISION": options.kv_precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": options.activation_group if quantized else 0,
    }


def _half_type() -> str:
    """The 16-bit arithmetic this CPU has; float32 where it has none."""
    capabilities = CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return next((name.lower() for name in ("BF16", "FP16") if name in capabilities), "f32").replace("fp16", "f16")


def _weight_bytes(manifest: StoreManifest, modes: frozenset[PrecisionMode]) -> int:
    """Memory of the packed weights; scales and zero-points of groups add about a tenth to each quantized plane."""
    if modes <= QUANTIZED:
        return int(manifest.parameters * (0.55 if modes == {PrecisionMode.INT4} else 1.1))
    return manifest.parameters * (2 if PrecisionMode.FP16 in modes else 4)
