"""The same weights as a plain quantized IR, as other servers load it: one precision, fixed."""

from __future__ import annotations

import shutil
from pathlib import Path

import openvino as ov

from dskquant import parameter_set
from dskquant.engines.openvino import compile_properties
from dskquant.engines.openvino.core import CORE
from dskquant.engines.openvino.graph import OpenVINOGraph
from dskquant.engines.openvino.ir import find_weights, read_ir
from dskquant.engines.openvino.paged import keep_wanted_logits, to_paged
from dskquant.engines.openvino.plane_rewrite import Source
from dskquant.engines.protocol import CompileOptions
from dskquant.modes import PrecisionMode
from dskquant.scheme import Role
from dskquant.store import DEFAULT_PARAMETER_SET, IR_BIN, IR_XML, StoreManifest

PLANES = {PrecisionMode.INT4: "base", PrecisionMode.INT8: "int8"}


def export_plain(store: Path, mode: PrecisionMode, destination: Path) -> None:
    """Writes a stateful IR with the 4-bit base plane (INT4) or the 8-bit plane (INT8) of the default parameter set."""
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for path in store.iterdir():
        if path.is_file() and path.name not in (IR_XML, IR_BIN):
            shutil.copy(path, destination)
    model = read_ir(store)
    parameters = parameter_set.read(store / DEFAULT_PARAMETER_SET)
    source = Source(parameters.matrices())
    for weight in find_weights(model):
        scheme = parameters.tensors[weight.name]
        linear = weight.role is Role.LINEAR
        values = source.plane(weight.name, PLANES[mode], scheme) if linear else source.eight_bit(weight.name, scheme)
        weight.source.replace(values.output(0))
    ov.save_model(model, destination / IR_XML, compress_to_fp16=False)


def compile_plain(directory: Path, mode: PrecisionMode) -> OpenVINOGraph:
    """The paged graph of a plain IR, compiled with the properties of our own graphs."""
    model = read_ir(directory)
    to_paged(model, StoreManifest.read(directory).num_layers)
    keep_wanted_logits(model)
    modes = frozenset({mode})
    compiled = CORE.compile_model(model, "CPU", compile_properties(modes, CompileOptions()))
    return OpenVINOGraph(compiled, modes, 0, None)
