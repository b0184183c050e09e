import datetime

from dskapi.v1 import common_pb2 as _common_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NoiseMeasure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOISE_MEASURE_UNSPECIFIED: _ClassVar[NoiseMeasure]
    NOISE_MEASURE_NOISE_TO_SIGNAL: _ClassVar[NoiseMeasure]

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_UNLOADED: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_SERVING: _ClassVar[ModelState]
    MODEL_STATE_UNLOADING: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]

class FallbackState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FALLBACK_STATE_UNSPECIFIED: _ClassVar[FallbackState]
    FALLBACK_STATE_HEALTHY: _ClassVar[FallbackState]
    FALLBACK_STATE_TRIPPED: _ClassVar[FallbackState]
    FALLBACK_STATE_COOLING: _ClassVar[FallbackState]
NOISE_MEASURE_UNSPECIFIED: NoiseMeasure
NOISE_MEASURE_NOISE_TO_SIGNAL: NoiseMeasure
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_UNLOADED: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_SERVING: ModelState
MODEL_STATE_UNLOADING: ModelState
MODEL_STATE_FAILED: ModelState
FALLBACK_STATE_UNSPECIFIED: FallbackState
FALLBACK_STATE_HEALTHY: FallbackState
FALLBACK_STATE_TRIPPED: FallbackState
FALLBACK_STATE_COOLING: FallbackState

class SwitchPrecisionRequest(_message.Message):
    __slots__ = ("model", "mode", "in_flight", "wait", "pin")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    model: str
    mode: _common_pb2.PrecisionMode
    in_flight: _common_pb2.InFlight
    wait: bool
    pin: bool
    def __init__(self, model: _Optional[str] = ..., mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., in_flight: _Optional[_Union[_common_pb2.InFlight, str]] = ..., wait: _Optional[bool] = ..., pin: _Optional[bool] = ...) -> None: ...

class SwitchPrecisionResponse(_message.Message):
    __slots__ = ("model", "from_mode", "to_mode", "generation", "resident", "done", "flip_us", "prepare_ms", "total_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FROM_MODE_FIELD_NUMBER: _ClassVar[int]
    TO_MODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FLIP_US_FIELD_NUMBER: _ClassVar[int]
    PREPARE_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    from_mode: _common_pb2.PrecisionMode
    to_mode: _common_pb2.PrecisionMode
    generation: int
    resident: bool
    done: bool
    flip_us: float
    prepare_ms: float
    total_ms: float
    def __init__(self, model: _Optional[str] = ..., from_mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., to_mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., generation: _Optional[int] = ..., resident: _Optional[bool] = ..., done: _Optional[bool] = ..., flip_us: _Optional[float] = ..., prepare_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class ApplyConfigRequest(_message.Message):
    __slots__ = ("config", "base_directory", "dry_run", "wait")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    BASE_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    config: str
    base_directory: str
    dry_run: bool
    wait: bool
    def __init__(self, config: _Optional[str] = ..., base_directory: _Optional[str] = ..., dry_run: _Optional[bool] = ..., wait: _Optional[bool] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("model", "generation", "in_flight", "wait")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    generation: int
    in_flight: _common_pb2.InFlight
    wait: bool
    def __init__(self, model: _Optional[str] = ..., generation: _Optional[int] = ..., in_flight: _Optional[_Union[_common_pb2.InFlight, str]] = ..., wait: _Optional[bool] = ...) -> None: ...

class ChangeResponse(_message.Message):
    __slots__ = ("model", "from_generation", "to_generation", "from_mode", "to_mode", "hash", "parameter_set", "changed", "done", "proofs", "phases_ms", "flip_us", "total_ms")
    class PhasesMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FROM_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TO_GENERATION_FIELD_NUMBER: _ClassVar[int]
    FROM_MODE_FIELD_NUMBER: _ClassVar[int]
    TO_MODE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_SET_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    PHASES_MS_FIELD_NUMBER: _ClassVar[int]
    FLIP_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    from_generation: int
    to_generation: int
    from_mode: _common_pb2.PrecisionMode
    to_mode: _common_pb2.PrecisionMode
    hash: str
    parameter_set: str
    changed: bool
    done: bool
    proofs: _containers.RepeatedCompositeFieldContainer[ModeProof]
    phases_ms: _containers.ScalarMap[str, float]
    flip_us: float
    total_ms: float
    def __init__(self, model: _Optional[str] = ..., from_generation: _Optional[int] = ..., to_generation: _Optional[int] = ..., from_mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., to_mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., hash: _Optional[str] = ..., parameter_set: _Optional[str] = ..., changed: _Optional[bool] = ..., done: _Optional[bool] = ..., proofs: _Optional[_Iterable[_Union[ModeProof, _Mapping]]] = ..., phases_ms: _Optional[_Mapping[str, float]] = ..., flip_us: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class ModeProof(_message.Message):
    __slots__ = ("mode", "kl_before", "kl_after", "agreement", "measure")
    MODE_FIELD_NUMBER: _ClassVar[int]
    KL_BEFORE_FIELD_NUMBER: _ClassVar[int]
    KL_AFTER_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.PrecisionMode
    kl_before: float
    kl_after: float
    agreement: float
    measure: NoiseMeasure
    def __init__(self, mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., kl_before: _Optional[float] = ..., kl_after: _Optional[float] = ..., agreement: _Optional[float] = ..., measure: _Optional[_Union[NoiseMeasure, str]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "pid", "started", "rss_bytes", "available_bytes", "models")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    started: _timestamp_pb2.Timestamp
    rss_bytes: int
    available_bytes: int
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., started: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., rss_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "state", "reason", "engine", "mode", "generation", "hash", "modes", "running_requests", "waiting_requests", "kv_blocks_total", "kv_blocks_free", "context_length", "architecture", "path", "change_in_progress", "kv_cache_bytes", "parameter_set", "generations", "second_engine", "measure")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CHANGE_IN_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_SET_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    SECOND_ENGINE_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ModelState
    reason: str
    engine: str
    mode: _common_pb2.PrecisionMode
    generation: int
    hash: str
    modes: _containers.RepeatedCompositeFieldContainer[ModeStatus]
    running_requests: int
    waiting_requests: int
    kv_blocks_total: int
    kv_blocks_free: int
    context_length: int
    architecture: str
    path: str
    change_in_progress: str
    kv_cache_bytes: int
    parameter_set: str
    generations: _containers.RepeatedCompositeFieldContainer[GenerationStatus]
    second_engine: SecondEngineStatus
    measure: NoiseMeasure
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., reason: _Optional[str] = ..., engine: _Optional[str] = ..., mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., generation: _Optional[int] = ..., hash: _Optional[str] = ..., modes: _Optional[_Iterable[_Union[ModeStatus, _Mapping]]] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., context_length: _Optional[int] = ..., architecture: _Optional[str] = ..., path: _Optional[str] = ..., change_in_progress: _Optional[str] = ..., kv_cache_bytes: _Optional[int] = ..., parameter_set: _Optional[str] = ..., generations: _Optional[_Iterable[_Union[GenerationStatus, _Mapping]]] = ..., second_engine: _Optional[_Union[SecondEngineStatus, _Mapping]] = ..., measure: _Optional[_Union[NoiseMeasure, str]] = ...) -> None: ...

class SecondEngineStatus(_message.Message):
    __slots__ = ("name", "use", "reason", "slots_total", "slots_used", "moves", "tokens", "graphs", "step_times")
    class TokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    name: str
    use: str
    reason: str
    slots_total: int
    slots_used: int
    moves: int
    tokens: _containers.ScalarMap[str, int]
    graphs: _containers.RepeatedCompositeFieldContainer[SecondGraphStatus]
    step_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    def __init__(self, name: _Optional[str] = ..., use: _Optional[str] = ..., reason: _Optional[str] = ..., slots_total: _Optional[int] = ..., slots_used: _Optional[int] = ..., moves: _Optional[int] = ..., tokens: _Optional[_Mapping[str, int]] = ..., graphs: _Optional[_Iterable[_Union[SecondGraphStatus, _Mapping]]] = ..., step_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ...) -> None: ...

class SecondGraphStatus(_message.Message):
    __slots__ = ("mode", "bytes", "reason")
    MODE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.PrecisionMode
    bytes: int
    reason: str
    def __init__(self, mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("engine", "mode", "rows", "ms")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    mode: _common_pb2.PrecisionMode
    rows: int
    ms: float
    def __init__(self, engine: _Optional[str] = ..., mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., rows: _Optional[int] = ..., ms: _Optional[float] = ...) -> None: ...

class GenerationStatus(_message.Message):
    __slots__ = ("number", "hash", "parameter_set", "committed", "active", "resident", "kl")
    class KlEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_SET_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    number: int
    hash: str
    parameter_set: str
    committed: _timestamp_pb2.Timestamp
    active: bool
    resident: bool
    kl: _containers.ScalarMap[str, float]
    def __init__(self, number: _Optional[int] = ..., hash: _Optional[str] = ..., parameter_set: _Optional[str] = ..., committed: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., active: _Optional[bool] = ..., resident: _Optional[bool] = ..., kl: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ModeStatus(_message.Message):
    __slots__ = ("mode", "resident", "bytes", "tokens", "requests", "engine", "engines")
    MODE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.PrecisionMode
    resident: bool
    bytes: int
    tokens: int
    requests: int
    engine: str
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    def __init__(self, mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., resident: _Optional[bool] = ..., bytes: _Optional[int] = ..., tokens: _Optional[int] = ..., requests: _Optional[int] = ..., engine: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("name", "ms", "reason")
    class MsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    ms: _containers.ScalarMap[int, float]
    reason: str
    def __init__(self, name: _Optional[str] = ..., ms: _Optional[_Mapping[int, float]] = ..., reason: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelSummary]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelSummary, _Mapping]]] = ...) -> None: ...

class ModelSummary(_message.Message):
    __slots__ = ("name", "state", "path", "architecture", "mode", "resident", "parameters", "context_length")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ModelState
    path: str
    architecture: str
    mode: _common_pb2.PrecisionMode
    resident: _containers.RepeatedScalarFieldContainer[_common_pb2.PrecisionMode]
    parameters: int
    context_length: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., path: _Optional[str] = ..., architecture: _Optional[str] = ..., mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., resident: _Optional[_Iterable[_Union[_common_pb2.PrecisionMode, str]]] = ..., parameters: _Optional[int] = ..., context_length: _Optional[int] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "path")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    model: str
    path: str
    def __init__(self, model: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model", "load_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    model: ModelStatus
    load_ms: float
    def __init__(self, model: _Optional[_Union[ModelStatus, _Mapping]] = ..., load_ms: _Optional[float] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ("model", "aborted_requests", "unload_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ABORTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    aborted_requests: int
    unload_ms: float
    def __init__(self, model: _Optional[str] = ..., aborted_requests: _Optional[int] = ..., unload_ms: _Optional[float] = ...) -> None: ...

class GetNoiseRequest(_message.Message):
    __slots__ = ("model", "samples")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    model: str
    samples: int
    def __init__(self, model: _Optional[str] = ..., samples: _Optional[int] = ...) -> None: ...

class GetNoiseResponse(_message.Message):
    __slots__ = ("model", "generation", "reference", "modes", "fallback", "lowered", "pin", "escalated_requests", "measure")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    LOWERED_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    ESCALATED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    model: str
    generation: int
    reference: _common_pb2.PrecisionMode
    modes: _containers.RepeatedCompositeFieldContainer[ModeNoise]
    fallback: _common_pb2.PrecisionMode
    lowered: bool
    pin: _common_pb2.PrecisionMode
    escalated_requests: int
    measure: NoiseMeasure
    def __init__(self, model: _Optional[str] = ..., generation: _Optional[int] = ..., reference: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., modes: _Optional[_Iterable[_Union[ModeNoise, _Mapping]]] = ..., fallback: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., lowered: _Optional[bool] = ..., pin: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., escalated_requests: _Optional[int] = ..., measure: _Optional[_Union[NoiseMeasure, str]] = ...) -> None: ...

class ModeNoise(_message.Message):
    __slots__ = ("mode", "state", "cause", "trips", "threshold", "samples", "mean_kl", "low", "high", "p50", "p90", "p99", "agreement", "total_samples", "non_finite", "evidence", "evidence_needed", "entropy", "margin", "unique_ngrams", "latest")
    MODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TRIPS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MEAN_KL_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_NEEDED_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_NGRAMS_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.PrecisionMode
    state: FallbackState
    cause: str
    trips: int
    threshold: float
    samples: int
    mean_kl: float
    low: float
    high: float
    p50: float
    p90: float
    p99: float
    agreement: float
    total_samples: int
    non_finite: int
    evidence: float
    evidence_needed: float
    entropy: float
    margin: float
    unique_ngrams: float
    latest: _containers.RepeatedCompositeFieldContainer[NoisePoint]
    def __init__(self, mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., state: _Optional[_Union[FallbackState, str]] = ..., cause: _Optional[str] = ..., trips: _Optional[int] = ..., threshold: _Optional[float] = ..., samples: _Optional[int] = ..., mean_kl: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., p50: _Optional[float] = ..., p90: _Optional[float] = ..., p99: _Optional[float] = ..., agreement: _Optional[float] = ..., total_samples: _Optional[int] = ..., non_finite: _Optional[int] = ..., evidence: _Optional[float] = ..., evidence_needed: _Optional[float] = ..., entropy: _Optional[float] = ..., margin: _Optional[float] = ..., unique_ngrams: _Optional[float] = ..., latest: _Optional[_Iterable[_Union[NoisePoint, _Mapping]]] = ...) -> None: ...

class NoisePoint(_message.Message):
    __slots__ = ("time", "kl", "agrees", "generation")
    TIME_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    AGREES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    kl: float
    agrees: bool
    generation: int
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., kl: _Optional[float] = ..., agrees: _Optional[bool] = ..., generation: _Optional[int] = ...) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ("model", "limit")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    limit: int
    def __init__(self, model: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class GetHistoryResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ...) -> None: ...

class HistoryEntry(_message.Message):
    __slots__ = ("sequence", "time", "model", "kind", "actor", "from_mode", "to_mode", "generation", "hash", "in_flight", "outcome", "reason", "phases_ms", "flip_us", "from_generation", "parameter_set", "proofs")
    class PhasesMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    FROM_MODE_FIELD_NUMBER: _ClassVar[int]
    TO_MODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PHASES_MS_FIELD_NUMBER: _ClassVar[int]
    FLIP_US_FIELD_NUMBER: _ClassVar[int]
    FROM_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_SET_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: _timestamp_pb2.Timestamp
    model: str
    kind: str
    actor: str
    from_mode: _common_pb2.PrecisionMode
    to_mode: _common_pb2.PrecisionMode
    generation: int
    hash: str
    in_flight: _common_pb2.InFlight
    outcome: str
    reason: str
    phases_ms: _containers.ScalarMap[str, float]
    flip_us: float
    from_generation: int
    parameter_set: str
    proofs: _containers.RepeatedCompositeFieldContainer[ModeProof]
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., model: _Optional[str] = ..., kind: _Optional[str] = ..., actor: _Optional[str] = ..., from_mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., to_mode: _Optional[_Union[_common_pb2.PrecisionMode, str]] = ..., generation: _Optional[int] = ..., hash: _Optional[str] = ..., in_flight: _Optional[_Union[_common_pb2.InFlight, str]] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., phases_ms: _Optional[_Mapping[str, float]] = ..., flip_us: _Optional[float] = ..., from_generation: _Optional[int] = ..., parameter_set: _Optional[str] = ..., proofs: _Optional[_Iterable[_Union[ModeProof, _Mapping]]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "time", "kind", "model", "message", "fields")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: _timestamp_pb2.Timestamp
    kind: str
    model: str
    message: str
    fields: _struct_pb2.Struct
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., kind: _Optional[str] = ..., model: _Optional[str] = ..., message: _Optional[str] = ..., fields: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...
