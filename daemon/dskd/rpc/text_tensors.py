"""The tensors of language models in the Open Inference Protocol: one text in, one text out, both BYTES of shape [1]."""

from __future__ import annotations

import struct

from dskapi.open_inference import infer_pb2
from dskd.errors import InvalidArgumentError

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
DATATYPE = "BYTES"
SHAPE = (1,)
LENGTH = struct.Struct("<I")
"""Goes ahead of each element in raw contents."""

InputTensor = infer_pb2.ModelInferRequest.InferInputTensor
OutputTensor = infer_pb2.ModelInferResponse.InferOutputTensor


def read_text(request: infer_pb2.ModelInferRequest) -> str:
    """The text of the only input, from typed or raw contents. Raises InvalidArgumentError for the first wrong field."""
    _check_inputs(request)
    _check_outputs(request)
    if request.raw_input_contents:
        field, content = "raw_input_contents[0]", _raw_element(request)
    else:
        field, content = "inputs[0].contents.bytes_contents[0]", _typed_element(request.inputs[0])
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(field, f"is no UTF-8 text: {error.reason} at byte {error.start}") from error


def write_text(response: infer_pb2.ModelInferResponse, text: str, raw: bool) -> None:
    """Makes `text` the only output of `response`, in raw or typed contents."""
    content = text.encode()
    tensor = OutputTensor(name=TEXT_OUTPUT, datatype=DATATYPE, shape=SHAPE)
    if raw:
        response.raw_output_contents.append(LENGTH.pack(len(content)) + content)
    else:
        tensor.contents.bytes_contents.append(content)
    response.outputs.append(tensor)


def _check_inputs(request: infer_pb2.ModelInferRequest) -> None:
    for index, tensor in enumerate(request.inputs):
        if tensor.name != TEXT_INPUT:
            raise InvalidArgumentError(f"inputs[{index}].name", f"no input {tensor.name!r}; the only one: {TEXT_INPUT}")
    if len(request.inputs) != 1:
        raise InvalidArgumentError("inputs", f"{len(request.inputs)} tensors; exactly one is needed: {TEXT_INPUT}")
    (tensor,) = request.inputs
    if tensor.datatype != DATATYPE:
        raise InvalidArgumentError("inputs[0].datatype", f"{tensor.datatype!r} is not allowed; allowed: {DATATYPE}")
    if tuple(tensor.shape) != SHAPE:
        given = f"[{', '.join(map(str, tensor.shape[:8]))}]"
        raise InvalidArgumentError("inputs[0].shape", f"{given} is not allowed; allowed: {list(SHAPE)}")
    for name in tensor.parameters:
        raise InvalidArgumentError(f"inputs[0].parameters.{name}", "is not known; tensors take no parameters")


def _check_outputs(request: infer_pb2.ModelInferRequest) -> None:
    for index, tensor in enumerate(request.outputs):
        if tensor.name != TEXT_OUTPUT:
            problem = f"no output {tensor.name!r}; the only one: {TEXT_OUTPUT}"
            raise InvalidArgumentError(f"outputs[{index}].name", problem)
        for name in tensor.parameters:
            raise InvalidArgumentError(
                f"outputs[{index}].parameters.{name}", "is not known; tensors take no parameters"
            )
    if len(request.outputs) > 1:
        raise InvalidArgumentError("outputs", f"{TEXT_OUTPUT} is asked for {len(request.outputs)} times")


def _raw_element(request: infer_pb2.ModelInferRequest) -> bytes:
    if request.inputs[0].HasField("contents"):
        raise InvalidArgumentError("inputs[0].contents", "must not be set together with raw_input_contents")
    if len(request.raw_input_contents) != 1:
        problem = f"{len(request.raw_input_contents)} contents for 1 input"
        raise InvalidArgumentError("raw_input_contents", problem)
    raw = request.raw_input_contents[0]
    if len(raw) < LENGTH.size:
        problem = f"{len(raw)} bytes; an element begins with its length in {LENGTH.size}"
        raise InvalidArgumentError("raw_input_contents[0]", problem)
    (length,) = LENGTH.unpack_from(raw)
    if length != len(raw) - LENGTH.size:
        problem = f"an element of {length} bytes, {len(raw) - LENGTH.size} follow its length"
        raise InvalidArgumentError("raw_input_contents[0]", problem)
    return raw[LENGTH.size :]


def _typed_element(tensor: InputTensor) -> bytes:
    for field, values in tensor.contents.ListFields():
        if field.name != "bytes_contents":
            problem = f"{len(values)} elements; {DATATYPE} belong into bytes_contents"
            raise InvalidArgumentError(f"inputs[0].contents.{field.name}", problem)
    if len(tensor.contents.bytes_contents) != 1:
        problem = f"{len(tensor.contents.bytes_contents)} elements; the shape says 1"
        raise InvalidArgumentError("inputs[0].contents.bytes_contents", problem)
    return tensor.contents.bytes_contents[0]
