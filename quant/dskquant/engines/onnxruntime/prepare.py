"""Brings an ONNX graph into the form that the quantizers of ONNX Runtime take."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnxruntime.quantization.shape_inference import quant_pre_process

from dskquant.errors import EngineError, SourceError

LEAST_OPSET = 13
"""That has quantization per channel."""

OPSET = 17
"""What older graphs are converted to."""

MOST_BYTES = 2 << 30
"""Of a graph in one file: a limit of protobuf."""


def read_onnx(path: Path) -> onnx.ModelProto:
    """The graph at `path` with all its weights. Raises SourceError where it is none, or too large for one file."""
    try:
        model = onnx.load(path)
        size = model.ByteSize()
    except (DecodeError, OSError, ValueError, onnx.checker.ValidationError) as error:
        raise SourceError(f"{path}: no ONNX graph that can be read: {error}") from error
    if not model.graph.node:
        raise SourceError(f"{path}: no ONNX graph: no nodes in it")
    if size > MOST_BYTES:
        raise SourceError(f"{path}: {size / 2**30:.1f} GiB with its weights; at most {MOST_BYTES >> 30} are supported")
    return model


def has_external_data(model: onnx.ModelProto) -> bool:
    """Whether weights of a model that was read without them lie in other files."""
    return any(onnx.external_data_helper.uses_external_data(tensor) for tensor in model.graph.initializer)


def prepare(model: onnx.ModelProto, source: Path, path: Path) -> onnx.ModelProto:
    """The same graph with constants as initializers, batch normalization folded into convolutions, an opset with
    quantization per channel, and a name of its own for every node; written to `path` too.

    Raises EngineError, naming the opset, where it cannot be converted.
    """
    onnx.save(_with_new_opset(model, source), path)
    try:
        with quiet_logging():
            quant_pre_process(path, path, skip_symbolic_shape=True)
        prepared = onnx.load(path)
    except Exception as error:  # the libraries have a dozen unrelated types for it
        raise EngineError(f"{source}: cannot be prepared for quantization: {error}") from error
    _flatten_biases(prepared.graph)
    _name_nodes(prepared.graph)
    onnx.save(prepared, path)
    return prepared


@contextmanager
def quiet_logging() -> Iterator[None]:
    """The quantizers write advice to the root logger; what goes wrong they raise, or it shows in the result."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _with_new_opset(model: onnx.ModelProto, source: Path) -> onnx.ModelProto:
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), OPSET)
    if opset >= LEAST_OPSET:
        return model
    try:
        return onnx.version_converter.convert_version(model, OPSET)
    except Exception as error:  # the library raises plain RuntimeErrors, and others from C++
        raise EngineError(
            f"{source}: opset {opset} is too old to quantize, and cannot be converted to {OPSET}: {error}"
        ) from error


def _flatten_biases(graph: onnx.GraphProto) -> None:
    """[1, N] to [N]: fused products have the first, and the quantizer understands the second."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        bias = initializers.get(node.input[2]) if node.op_type == "Gemm" and len(node.input) > 2 else None
        if bias is not None and len(bias.dims) == 2 and bias.dims[0] == 1:
            del bias.dims[0]


def _name_nodes(graph: onnx.GraphProto) -> None:
    taken: set[str] = set()
    for number, node in enumerate(graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}#{number}"
        taken.add(node.name)
