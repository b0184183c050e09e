from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class PrecisionMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRECISION_MODE_UNSPECIFIED: _ClassVar[PrecisionMode]
    PRECISION_MODE_INT4: _ClassVar[PrecisionMode]
    PRECISION_MODE_INT8: _ClassVar[PrecisionMode]
    PRECISION_MODE_FP16: _ClassVar[PrecisionMode]
    PRECISION_MODE_FP32: _ClassVar[PrecisionMode]

class InFlight(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_FLIGHT_UNSPECIFIED: _ClassVar[InFlight]
    IN_FLIGHT_MIGRATE: _ClassVar[InFlight]
    IN_FLIGHT_FINISH: _ClassVar[InFlight]
PRECISION_MODE_UNSPECIFIED: PrecisionMode
PRECISION_MODE_INT4: PrecisionMode
PRECISION_MODE_INT8: PrecisionMode
PRECISION_MODE_FP16: PrecisionMode
PRECISION_MODE_FP32: PrecisionMode
IN_FLIGHT_UNSPECIFIED: InFlight
IN_FLIGHT_MIGRATE: InFlight
IN_FLIGHT_FINISH: InFlight
