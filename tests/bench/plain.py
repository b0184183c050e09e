"""The same weights as a plain quantized IR, as other servers load it: one precision, fixed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import openvino as ov

from dskquant import parameter_set
from dskquant.engines.openvino.ir import Weight, find_weights, read_ir
from dskquant.engines.openvino.plane_rewrite import KeepAlive, dequantized
from dskquant.modes import PrecisionMode
from dskquant.parameter_set import MappedMatrix, MatrixReader
from dskquant.planes import quantize
from dskquant.scheme import Role
from dskquant.store import DEFAULT_PARAMETER_SET, IR_BIN, IR_XML


def export_plain(store: Path, mode: PrecisionMode, destination: Path) -> None:
    """Writes a stateful IR with the base plane alone (INT4), or with 8-bit codes per channel (INT8)."""
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for path in store.iterdir():
        if path.is_file() and path.name not in (IR_XML, IR_BIN):
            shutil.copy(path, destination)
    model = read_ir(store)
    matrices = parameter_set.read(store / DEFAULT_PARAMETER_SET).matrices()
    keep_alive: KeepAlive = []
    for weight in find_weights(model):
        matrix, kind = _matrix(weight, mode, matrices)
        weight.source.replace(dequantized(matrix, weight.shape, kind, keep_alive).output(0))
    ov.save_model(model, destination / IR_XML, compress_to_fp16=False)


def _matrix(weight: Weight, mode: PrecisionMode, matrices: MatrixReader) -> tuple[MappedMatrix, ov.Type]:
    if weight.role is not Role.LINEAR:
        return matrices.eight_bit(weight.name), ov.Type.u8
    if mode is PrecisionMode.INT4:
        return matrices.plane(weight.name, "base"), ov.Type.u4
    pieces = [quantize(rows, 8, 0, symmetric=False) for rows in weight.pieces()]
    parts = ([getattr(piece, part) for piece in pieces] for part in ("codes", "scales", "zero_points"))
    return MappedMatrix(*(np.concatenate(part) for part in parts)), ov.Type.u8
