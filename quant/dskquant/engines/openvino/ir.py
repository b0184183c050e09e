"""Reads a stored stateful IR and finds its weights in it, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from dskquant.engines.openvino.core import CORE
from dskquant.errors import StoreError
from dskquant.planes import Float32
from dskquant.scheme import Role
from dskquant.store import IR_XML

LOGITS = "logits"
RUNTIME_OPTIONS = "runtime_options"
ROWS_AT_ONCE = 1 << 22
"""Weights converted to float32 in one piece: bounds the memory of work on a large matrix."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight matrix [N, K] of a model: its Constant and the operations that read it."""

    name: str
    role: Role
    constant: ov.Node
    source: ov.Output  # what the consumers read: the constant, or its conversion to float32
    matmuls: tuple[ov.Node, ...]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.constant.get_output_shape(0)
        return rows, columns

    def pieces(self) -> Iterator[Float32]:
        """The matrix in float32, some whole rows at a time."""
        rows, columns = self.shape
        step = max(1, ROWS_AT_ONCE // columns)
        raw = _raw_values(self.constant)
        for start in range(0, rows, step):
            yield _as_float32(raw[start : start + step])


def read_ir(store: Path) -> ov.Model:
    """The stateful model of `store`, its weights mapped, without the compile options that its writer left in it.

    Raises StoreError when it cannot be read.
    """
    path = store / IR_XML
    if not path.is_file():
        raise StoreError(f"{path}: missing; convert the model again")
    try:
        model = CORE.read_model(path)
    except RuntimeError as error:
        raise StoreError(f"{path}: not a readable OpenVINO IR: {str(error).strip().splitlines()[-1]}") from error
    _forget_runtime_options(model)
    return model


def _forget_runtime_options(model: ov.Model) -> None:
    """optimum-intel leaves KV_CACHE_PRECISION and ACTIVATIONS_SCALE_FACTOR in the IR, and `compile_model` takes them as
    defaults; but what a graph is compiled with must follow from `CompileOptions` alone. The stored file keeps them: it
    is the export byte for byte, and other programs may want them.
    """
    if model.has_rt_info(RUNTIME_OPTIONS):
        del model.get_rt_info()[RUNTIME_OPTIONS]


def find_weights(model: ov.Model) -> list[Weight]:
    """Every weight matrix of `model` that a MatMul or an embedding look-up reads, in the order of execution."""
    found = (_as_weight(node) for node in model.get_ordered_ops() if node.get_type_name() == "Constant")
    return [weight for weight in found if weight is not None]


def _as_weight(constant: ov.Node) -> Weight | None:
    if len(constant.get_output_shape(0)) != 2 or not constant.get_element_type().is_real():
        return None
    source = constant.output(0)
    targets = list(source.get_target_inputs())
    if len(targets) == 1 and targets[0].get_node().get_type_name() == "Convert":
        source = targets[0].get_node().output(0)
        targets = list(source.get_target_inputs())
    looked_up = [
        target for target in targets if target.get_node().get_type_name() == "Gather" and target.get_index() == 0
    ]
    matmuls = [target.get_node() for target in targets if _multiplies_rows(target)]
    if not looked_up and not matmuls:
        return None
    role = Role.EMBEDDING if looked_up else Role.LM_HEAD if _feeds_logits(matmuls[0]) else Role.LINEAR
    return Weight(_weight_name(constant), role, constant, source, tuple(matmuls))


def _multiplies_rows(target: Any) -> bool:
    node = target.get_node()
    return bool(node.get_type_name() == "MatMul" and target.get_index() == 1 and node.get_attributes()["transpose_b"])


def _feeds_logits(matmul: ov.Node) -> bool:
    consumers = [target.get_node() for target in matmul.output(0).get_target_inputs()]
    return any(node.get_type_name() == "Result" for node in consumers)


def _weight_name(constant: ov.Node) -> str:
    """The name as Hugging Face spells it: model.layers.0.self_attn.q_proj.weight.

    optimum-intel names constants after the attribute path of the torch module, which starts with "self."; weights that
    it keeps in 16 bit while it traces end in "._openvino_orig_weight", those it rounds afterwards in "_compressed".
    """
    name = str(constant.get_friendly_name()).removeprefix("self.").removesuffix("_compressed")
    return name.replace("._openvino_orig_", ".")


def _raw_values(constant: ov.Node) -> Any:
    values = constant.data  # a view: the weights stay in the mapped file
    # numpy has no bfloat16; the engine hands the bit patterns out under another 16-bit type
    return values.view(np.uint16) if constant.get_element_type() == ov.Type.bf16 else values


def _as_float32(values: Any) -> Float32:
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)
