"""Tensors of the Open Inference Protocol as arrays, in typed and raw contents, checked field by field."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskapi.open_inference import infer_pb2, model_config_pb2
from dskd.errors import InvalidArgumentError
from dskquant.plain.protocol import Tensors, TensorSpec

InputTensor = infer_pb2.ModelInferRequest.InferInputTensor
OutputTensor = infer_pb2.ModelInferResponse.InferOutputTensor

TOLD_SIZES = 8
"""Of a shape; a client may send any number of them."""


@dataclass(frozen=True, slots=True)
class Datatype:
    """One datatype that graphs know. The protocol also has BF16 and BYTES, which no engine takes."""

    name: str
    dtype: np.dtype[Any]
    field: str | None  # of typed contents; None: it has raw contents alone
    config: model_config_pb2.DataType


_CONFIG = model_config_pb2
DATATYPES = tuple(
    Datatype(name, np.dtype(dtype), field, config)
    for name, dtype, field, config in (
        ("BOOL", "?", "bool_contents", _CONFIG.TYPE_BOOL),
        ("INT8", "<i1", "int_contents", _CONFIG.TYPE_INT8),
        ("INT16", "<i2", "int_contents", _CONFIG.TYPE_INT16),
        ("INT32", "<i4", "int_contents", _CONFIG.TYPE_INT32),
        ("INT64", "<i8", "int64_contents", _CONFIG.TYPE_INT64),
        ("UINT8", "<u1", "uint_contents", _CONFIG.TYPE_UINT8),
        ("UINT16", "<u2", "uint_contents", _CONFIG.TYPE_UINT16),
        ("UINT32", "<u4", "uint_contents", _CONFIG.TYPE_UINT32),
        ("UINT64", "<u8", "uint64_contents", _CONFIG.TYPE_UINT64),
        ("FP16", "<f2", None, _CONFIG.TYPE_FP16),
        ("FP32", "<f4", "fp32_contents", _CONFIG.TYPE_FP32),
        ("FP64", "<f8", "fp64_contents", _CONFIG.TYPE_FP64),
    )
)
_BY_DTYPE = {datatype.dtype: datatype for datatype in DATATYPES}


def datatype_of(spec: TensorSpec) -> Datatype:
    """How the protocol calls what a graph takes or makes."""
    return _BY_DTYPE[spec.dtype]


def read_tensors(
    request: infer_pb2.ModelInferRequest, specs: Sequence[TensorSpec], batch_axis: int | None
) -> dict[str, NDArray[Any]]:
    """The inputs of `request`, which are exactly those of `specs`.

    Arrays from raw contents share their memory and cannot be written. Raises InvalidArgumentError for the first field
    that is wrong.
    """
    known = {spec.name: spec for spec in specs}
    _check_names(request, known)
    _check_contents(request)
    tensors = {}
    for index, tensor in enumerate(request.inputs):
        spec = known[tensor.name]
        _check_header(index, tensor, spec)
        values = _raw_values(request, index, spec) if request.raw_input_contents else _typed_values(index, tensor, spec)
        tensors[spec.name] = values.reshape(tuple(tensor.shape))
    if batch_axis == 0:
        _check_rows(request)
    return tensors


def wanted_outputs(request: infer_pb2.ModelInferRequest, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The outputs that `request` asks for, in its order; all when it names none. Raises InvalidArgumentError."""
    known = {spec.name: spec for spec in specs}
    wanted: dict[str, TensorSpec] = {}
    for index, output in enumerate(request.outputs):
        field = f"outputs[{index}]"
        if output.name not in known:
            raise InvalidArgumentError(f"{field}.name", f"no output {output.name!r}; known: {', '.join(known)}")
        if output.name in wanted:
            raise InvalidArgumentError(f"{field}.name", f"{output.name!r} is asked for twice")
        _check_no_parameters(field, output.parameters)
        wanted[output.name] = known[output.name]
    return list((wanted or known).values())


def write_tensors(
    response: infer_pb2.ModelInferResponse, tensors: Tensors, specs: Sequence[TensorSpec], raw: bool
) -> None:
    """Adds the outputs of `specs`; raw too where one of them has no typed contents."""
    raw = raw or any(datatype_of(spec).field is None for spec in specs)
    for spec in specs:
        array, datatype = tensors[spec.name], datatype_of(spec)
        output = response.outputs.add(name=spec.name, datatype=datatype.name, shape=array.shape)
        if raw:
            response.raw_output_contents.append(array.astype(datatype.dtype, copy=False).tobytes())
        elif datatype.field is not None:
            getattr(output.contents, datatype.field).extend(array.ravel().tolist())


def _check_names(request: infer_pb2.ModelInferRequest, known: Mapping[str, TensorSpec]) -> None:
    given: set[str] = set()
    for index, tensor in enumerate(request.inputs):
        field = f"inputs[{index}].name"
        if tensor.name not in known:
            raise InvalidArgumentError(field, f"no input {tensor.name!r}; known: {', '.join(known)}")
        if tensor.name in given:
            raise InvalidArgumentError(field, f"{tensor.name!r} is given twice")
        given.add(tensor.name)
    missing = [name for name in known if name not in given]
    if missing:
        raise InvalidArgumentError("inputs", f"{', '.join(missing)} missing; needed: {', '.join(known)}")


def _check_contents(request: infer_pb2.ModelInferRequest) -> None:
    if not request.raw_input_contents:
        return
    for index, tensor in enumerate(request.inputs):
        if tensor.HasField("contents"):
            raise InvalidArgumentError(f"inputs[{index}].contents", "must not be set together with raw_input_contents")
    if len(request.raw_input_contents) != len(request.inputs):
        problem = f"{len(request.raw_input_contents)} contents for {len(request.inputs)} inputs"
        raise InvalidArgumentError("raw_input_contents", problem)


def _check_header(index: int, tensor: InputTensor, spec: TensorSpec) -> None:
    wanted = datatype_of(spec).name
    if tensor.datatype != wanted:
        raise InvalidArgumentError(
            f"inputs[{index}].datatype", f"{tensor.datatype!r} is not allowed for {spec.name}; allowed: {wanted}"
        )
    _check_shape(f"inputs[{index}].shape", tensor.shape, spec)
    _check_no_parameters(f"inputs[{index}]", tensor.parameters)


def _check_shape(field: str, shape: Collection[int], spec: TensorSpec) -> None:
    fits = len(shape) == len(spec.shape) and all(
        size >= 1 and wanted in (None, size) for wanted, size in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        told = ", ".join(map(str, list(shape)[:TOLD_SIZES])) + (", ..." if len(shape) > TOLD_SIZES else "")
        wanted = ", ".join("at least 1" if size is None else str(size) for size in spec.shape)
        raise InvalidArgumentError(field, f"[{told}] is not allowed for {spec.name}; allowed: [{wanted}]")


def _check_no_parameters(field: str, parameters: Mapping[str, object]) -> None:
    for name in parameters:
        raise InvalidArgumentError(f"{field}.parameters.{name}", "is not known; tensors take no parameters")


def _check_rows(request: infer_pb2.ModelInferRequest) -> None:
    rows = request.inputs[0].shape[0]
    for index, tensor in enumerate(request.inputs):
        if tensor.shape[0] != rows:
            problem = f"{tensor.shape[0]} rows, where {request.inputs[0].name} has {rows}"
            raise InvalidArgumentError(f"inputs[{index}].shape", problem)


def _raw_values(request: infer_pb2.ModelInferRequest, index: int, spec: TensorSpec) -> NDArray[Any]:
    raw, dtype, field = request.raw_input_contents[index], datatype_of(spec).dtype, f"raw_input_contents[{index}]"
    needed = math.prod(request.inputs[index].shape) * dtype.itemsize
    if len(raw) != needed:
        raise InvalidArgumentError(field, f"{len(raw)} bytes; datatype and shape say {needed}")
    if dtype.kind == "b" and np.frombuffer(raw, np.uint8).max() > 1:
        raise InvalidArgumentError(field, "has bytes that are neither 0 nor 1, the values of BOOL")
    return np.frombuffer(raw, dtype)


def _typed_values(index: int, tensor: InputTensor, spec: TensorSpec) -> NDArray[Any]:
    datatype, contents = datatype_of(spec), f"inputs[{index}].contents"
    if datatype.field is None:
        raise InvalidArgumentError(contents, f"{datatype.name} has no typed contents; use raw_input_contents")
    for field, _ in tensor.contents.ListFields():
        if field.name != datatype.field:
            raise InvalidArgumentError(f"{contents}.{field.name}", f"{datatype.name} belongs into {datatype.field}")
    values, needed = getattr(tensor.contents, datatype.field), math.prod(tensor.shape)
    if len(values) != needed:
        raise InvalidArgumentError(f"{contents}.{datatype.field}", f"{len(values)} elements; the shape says {needed}")
    return _narrowed(f"{contents}.{datatype.field}", np.array(values), datatype)


def _narrowed(field: str, values: NDArray[Any], datatype: Datatype) -> NDArray[Any]:
    """Small integers travel in 32 bits."""
    if datatype.dtype.kind in "iu":
        limits = np.iinfo(datatype.dtype)
        if values.min() < limits.min or values.max() > limits.max:
            raise InvalidArgumentError(field, f"has values outside of {datatype.name}: {limits.min} to {limits.max}")
    return values.astype(datatype.dtype, copy=False)
