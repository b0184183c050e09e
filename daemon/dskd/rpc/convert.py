"""Words of the protocol and the same words of the daemon. Each pair stands here once."""

from __future__ import annotations

from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from dskapi.v1 import common_pb2, control_pb2, inference_pb2
from dskd.engine.request import FinishReason, InFlight
from dskd.errors import InvalidArgumentError
from dskd.monitor.states import FallbackState, NoiseMeasure
from dskd.states import ModelState
from dskquant.modes import PrecisionMode

MODES = {
    PrecisionMode.INT4: common_pb2.PRECISION_MODE_INT4,
    PrecisionMode.INT8: common_pb2.PRECISION_MODE_INT8,
    PrecisionMode.FP16: common_pb2.PRECISION_MODE_FP16,
    PrecisionMode.FP32: common_pb2.PRECISION_MODE_FP32,
}
IN_FLIGHT = {
    InFlight.MIGRATE: common_pb2.IN_FLIGHT_MIGRATE,
    InFlight.FINISH: common_pb2.IN_FLIGHT_FINISH,
}
FINISH_REASONS = {
    FinishReason.END_OF_TEXT: inference_pb2.FINISH_REASON_END_OF_TEXT,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
STATES = {
    ModelState.UNLOADED: control_pb2.MODEL_STATE_UNLOADED,
    ModelState.LOADING: control_pb2.MODEL_STATE_LOADING,
    ModelState.SERVING: control_pb2.MODEL_STATE_SERVING,
    ModelState.UNLOADING: control_pb2.MODEL_STATE_UNLOADING,
    ModelState.FAILED: control_pb2.MODEL_STATE_FAILED,
}
FALLBACK_STATES = {
    FallbackState.HEALTHY: control_pb2.FALLBACK_STATE_HEALTHY,
    FallbackState.TRIPPED: control_pb2.FALLBACK_STATE_TRIPPED,
    FallbackState.COOLING: control_pb2.FALLBACK_STATE_COOLING,
}
MEASURES = {NoiseMeasure.NOISE_TO_SIGNAL: control_pb2.NOISE_MEASURE_NOISE_TO_SIGNAL}
"""KL is told by telling none."""

_MODE_OF: dict[int, PrecisionMode] = {number: mode for mode, number in MODES.items()}
_IN_FLIGHT_OF: dict[int, InFlight] = {number: word for word, number in IN_FLIGHT.items()}


def chosen_mode(number: int, field: str) -> PrecisionMode | None:
    """The mode of that number, None for "unspecified". Raises InvalidArgumentError for an unknown number."""
    if number == common_pb2.PRECISION_MODE_UNSPECIFIED:
        return None
    if number not in _MODE_OF:
        known = ", ".join(f"{value} ({mode.value})" for value, mode in _MODE_OF.items())
        raise InvalidArgumentError(field, f"{number} is no precision mode; known: {known}")
    return _MODE_OF[number]


def chosen_in_flight(number: int, field: str) -> InFlight:
    """The word of that number; "unspecified" means migrate. Raises InvalidArgumentError for an unknown number."""
    if number == common_pb2.IN_FLIGHT_UNSPECIFIED:
        return InFlight.MIGRATE
    if number not in _IN_FLIGHT_OF:
        known = ", ".join(f"{value} ({word.value})" for value, word in _IN_FLIGHT_OF.items())
        raise InvalidArgumentError(field, f"{number} is not known; known: {known}")
    return _IN_FLIGHT_OF[number]


def sendable(value: Any) -> Any:
    """`value`, its texts (in lists and tables too) as protobuf takes them: half of a surrogate pair is spelled out."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {sendable(key): sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [sendable(item) for item in value]
    return value


def timestamp(seconds: float) -> Timestamp:
    """`seconds` since the epoch."""
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp
