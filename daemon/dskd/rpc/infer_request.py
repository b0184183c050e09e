"""From the ModelInferRequest of the Open Inference Protocol to a GenerateRequest, and back for the names of fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dskapi.open_inference import infer_pb2
from dskapi.v1 import inference_pb2
from dskapi.v1.common_pb2 import PrecisionMode as WireMode
from dskd.errors import InvalidArgumentError
from dskd.rpc.convert import MODES
from dskd.rpc.parse import SAMPLING_RANGES, Range
from dskd.rpc.text_tensors import TEXT_INPUT, read_text
from dskquant.modes import PrecisionMode

VERSION = "1"
"""Of every model: one version serves at a time, and its generation is told by the answers."""

EMPTY_FINAL = "triton_enable_empty_final_response"
"""Parameter: the last response to a request of a stream is sent in any case, with or without text."""

INT32, UINT64 = Range(-(2**31), 2**31 - 1), Range(0, 2**64 - 1)

Parameters = Mapping[str, infer_pb2.InferParameter]

PARAMETER_KINDS: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "temperature": (float, int),
    "top_k": (int,),
    "top_p": (float, int),
    "min_p": (float, int),
    "repetition_penalty": (float, int),
    "seed": (int,),
    "stop": (str,),
    "ignore_eos": (bool,),
    "precision": (str,),
    EMPTY_FINAL: (bool,),
}
"""The parameters of a request, named as Triton's backend for vLLM does, and what their values may be."""

_FIELDS = {
    "model": "model_name",
    "prompt": TEXT_INPUT,
    "max_new_tokens": "parameters.max_tokens",
    "stop[0]": "parameters.stop",
    "sampling.seed": "parameters.seed",
    **{f"sampling.{name}": f"parameters.{name}" for name in SAMPLING_RANGES},
}


@contextmanager
def fields_of_infer_request() -> Iterator[None]:
    """Errors that name a field of a GenerateRequest name the one of the ModelInferRequest that it was made from."""
    try:
        yield
    except InvalidArgumentError as error:
        raise InvalidArgumentError(_FIELDS.get(error.field, error.field), error.description) from error


def generate_request(request: infer_pb2.ModelInferRequest) -> inference_pb2.GenerateRequest:
    """What `request` asks for. Raises InvalidArgumentError for the first field that is wrong."""
    check_version("model_version", request.model_version)
    prompt = read_text(request)
    given = parameter_values(request.parameters, PARAMETER_KINDS)
    _check_size(given, "max_tokens", INT32)
    _check_size(given, "top_k", INT32)
    _check_size(given, "seed", UINT64)
    sampling = {name: given[name] for name in (*SAMPLING_RANGES, "seed") if name in given}
    return inference_pb2.GenerateRequest(
        model=request.model_name,
        prompt=prompt,
        max_new_tokens=given.get("max_tokens"),
        sampling=inference_pb2.Sampling(**sampling),
        stop=[given["stop"]] if "stop" in given else [],
        ignore_eos=given.get("ignore_eos", False),
        precision=_wire_precision(given),
    )


def check_version(field: str, version: str) -> None:
    """Raises InvalidArgumentError unless `version` is the one there is, or none."""
    if version not in ("", VERSION):
        raise InvalidArgumentError(field, f"no version {version!r}; the only one: {VERSION}")


def parameter_values(parameters: Parameters, kinds_by_name: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The values by name. Raises InvalidArgumentError for unknown names and wrong kinds."""
    values = {}
    for name, parameter in parameters.items():
        if name not in kinds_by_name:
            known = ", ".join(kinds_by_name)
            raise InvalidArgumentError(f"parameters.{name}", f"is not known; known: {known}")
        choice = parameter.WhichOneof("parameter_choice")
        values[name] = getattr(parameter, choice) if choice else None
        if type(values[name]) not in kinds_by_name[name]:
            kinds = " or ".join(kind.__name__ for kind in kinds_by_name[name])
            given = type(values[name]).__name__ if choice else "nothing"
            raise InvalidArgumentError(f"parameters.{name}", f"{given} is not allowed; allowed: {kinds}")
    return values


def _check_size(given: Mapping[str, Any], name: str, allowed: Range) -> None:
    if name in given:
        allowed.check(f"parameters.{name}", given[name])


def _wire_precision(given: Mapping[str, Any]) -> WireMode | None:
    mode = chosen_precision(given)
    return MODES[mode] if mode else None


def chosen_precision(given: Mapping[str, Any]) -> PrecisionMode | None:
    """The mode that the parameters ask for. Raises InvalidArgumentError for one that is none."""
    if "precision" not in given:
        return None
    try:
        return PrecisionMode(given["precision"])
    except ValueError:
        known = ", ".join(mode.value for mode in MODES)
        problem = f"{given['precision']!r} is no precision mode; known: {known}"
        raise InvalidArgumentError("parameters.precision", problem) from None
