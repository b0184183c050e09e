"""The stateful IR as it lies in a store: what kind it is, and a plain run of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov

from dskquant.architecture import DecoderConfig
from dskquant.engines.openvino.core import CORE
from dskquant.engines.protocol import Logits
from dskquant.errors import SourceError
from dskquant.floats import all_finite
from dskquant.sources.protocol import SourceTensor

INPUTS = {"input_ids", "attention_mask", "position_ids", "beam_idx"}
OUTPUTS = {"logits"}
WEIGHT_TYPES = {ov.Type.f16: "f16", ov.Type.bf16: "bf16", ov.Type.f32: "f32"}
INDEX_TYPES = {ov.Type.i64, ov.Type.i32, ov.Type.boolean}
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


@dataclass(frozen=True, slots=True)
class Weights:
    """What the constants of an IR amount to."""

    dtype: str  # of most of the weights
    parameters: int


def inspect_ir(path: Path, decoder: DecoderConfig) -> Weights:
    """Checks that `path` is a stateful decoder of this configuration with finite weights in 16 or 32 bit.

    Raises SourceError saying what is different.
    """
    try:
        model = CORE.read_model(path)
    except RuntimeError as error:
        raise SourceError(f"{path}: not a readable OpenVINO IR: {str(error).strip().splitlines()[-1]}") from error
    for role, expected, found in (
        ("inputs", INPUTS, {name for port in model.inputs for name in port.names}),
        ("outputs", OUTPUTS, {name for port in model.outputs for name in port.names}),
    ):
        if expected - found:
            raise SourceError(f"{path}: {role} {sorted(found)}, expected {sorted(expected)}: not a stateful text model")
    _check_states(path, model, decoder)
    return _read_weights(path, model)


def _check_states(path: Path, model: ov.Model, decoder: DecoderConfig) -> None:
    operations = Counter(node.get_type_name() for node in model.get_ops())
    expected = {"ReadValue": 2 * decoder.num_layers, "ScaledDotProductAttention": decoder.num_layers}
    for name, count in expected.items():
        if operations[name] != count:
            raise SourceError(
                f"{path}: {operations[name]} {name} operations, expected {count}: not stateful or not this model"
            )


def _read_weights(path: Path, model: ov.Model) -> Weights:
    sizes: Counter[str] = Counter()
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() in INDEX_TYPES:
            continue
        origin = f"{path}: constant {node.get_friendly_name()}"
        dtype = WEIGHT_TYPES.get(node.get_element_type())
        if dtype is None:
            raise SourceError(f"{origin}: {node.get_element_type()}; export with --weight-format fp16")
        sizes[dtype] += _checked_size(origin, node, dtype)
    return Weights(dtype=sizes.most_common(1)[0][0], parameters=sizes.total())


def _checked_size(origin: str, node: ov.Node, dtype: str) -> int:
    values = node.data
    if values.ndim == 0:  # numbers of the graph, such as the mask's minus infinity
        return 0
    tensor = SourceTensor.of_mapped(origin, values.view(np.uint16) if dtype == "bf16" else values, dtype)
    if not all(all_finite(piece, dtype) for piece in tensor.pieces()):
        raise SourceError(f"{origin}: holds NaN or infinite values")
    return int(values.size)


class StatefulModel:
    """Runs a stateful IR on its own, one sequence, in float32 arithmetic: the plain form of what graphs do in pages."""

    def __init__(self, path: Path) -> None:
        self._request = CORE.compile_model(path, "CPU", EXACT).create_infer_request()
        self._past = 0

    def run(self, tokens: Sequence[int]) -> Logits:
        """Appends `tokens` to the sequence and returns their logits, [tokens, vocabulary]."""
        total = self._past + len(tokens)
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(self._past, total, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._past = total
        return np.array(self._request.infer(inputs)["logits"][0])

    def reset(self) -> None:
        """Forgets the sequence."""
        self._request.reset_state()
        self._past = 0
