"""The configuration of the daemon: every key, its type and its default. `etc/dskd.toml` shows them commented."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tomli

from dskd.address import Address
from dskd.monitor.config import LARGEST_FACTOR, LARGEST_KL, LONGEST_S, MOST_REQUESTS, MonitorConfig
from dskd.typed_toml import Between, Builder, ConfigError, OneOf
from dskd.units import ByteSize
from dskquant.engines.protocol import CompileOptions, WeightLayout
from dskquant.modes import PrecisionMode
from dskquant.plain.noise import MOST_DB

SYSTEM_SOCKET = Path("/run/dskd/dskd.sock")
SYSTEM_STATE = Path("/var/lib/dskd")
SYSTEM_CONFIG = Path("/etc/dskd/dskd.toml")
OPEN_TO_ALL = (
    "can be reached from other machines without encryption; "
    "set [server.tls] certificate and key, or insecure = true if that is really meant"
)
MODELS = "models"
"""Directory in the state directory with one for each model."""

MOST_BATCH_TOKENS = 1 << 16
"""In one step."""
MOST_BYTES = 1 << 50
MOST_BATCH_ROWS = 4096
"""Of requests to plain graphs that share a run."""

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Problems = Iterator[tuple[str, str]]
"""Keys of a section, each with what is wrong there."""


def default_socket() -> Path:
    """The system's socket where this user may make it, otherwise one of the user alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and not _can_make(SYSTEM_SOCKET):
        return Path(runtime) / SYSTEM_SOCKET.name
    return SYSTEM_SOCKET


def default_state_dir() -> Path:
    """The system's directory where this user may make it, otherwise one of the user alone."""
    if _can_make(SYSTEM_STATE):
        return SYSTEM_STATE
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / SYSTEM_STATE.name


def _can_make(path: Path) -> bool:
    nearest = next(folder for folder in path.parents if folder.exists())
    return os.access(nearest, os.W_OK)


class SocketMode(int):
    """Permissions of a unix socket; in files a string of octal digits."""

    @classmethod
    def from_toml(cls, value: object, base: Path) -> SocketMode:
        """Reads `value`. Raises ValueError unless it is an octal string that lets the owner in."""
        if not isinstance(value, str) or not re.fullmatch(r"0?[67][0-7]{2}", value):
            raise ValueError('allowed: a string of octal digits that gives the owner access, such as "0660"')
        return cls(value, 8)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """[server.tls]: all TCP addresses speak TLS."""

    certificate: Path
    key: Path
    client_ca: Path | None = None  # set: clients must show a certificate of this authority

    def problems(self) -> Problems:
        for name in ("certificate", "key", "client_ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                yield name, f"no file {path}"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """[server]: where and how the daemon answers."""

    listen: tuple[Address, ...] = field(default_factory=lambda: (Address(path=default_socket()),))
    socket_mode: SocketMode = field(default=SocketMode(0o660))
    insecure: bool = False
    grace_s: Annotated[float, Between(0, LONGEST_S)] = 30.0
    max_message_bytes: Annotated[ByteSize, Between(1, 2**31 - 1)] = field(default=ByteSize(16 << 20))
    max_concurrent_requests: Annotated[int, Between(1, MOST_REQUESTS)] = 1024
    allow_load_from_path: bool = False
    state_dir: Path = field(default_factory=default_state_dir)
    tls: TlsConfig | None = None

    def model_state(self, name: str) -> Path:
        """The directory of what is kept of one model."""
        return self.state_dir / MODELS / name

    def problems(self) -> Problems:
        if not self.listen:
            yield "listen", "at least one address is needed"
        for address in self.listen:
            if not (address.is_loopback or self.tls or self.insecure):
                yield "listen", f"{address} {OPEN_TO_ALL}"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """[scheduler]: how much one step does, and how many requests may be open or wait."""

    max_batch_tokens: Annotated[int, Between(1, MOST_BATCH_TOKENS)] = 512
    max_sequences: Annotated[int, Between(1, MOST_BATCH_TOKENS)] = 64
    max_waiting: Annotated[int, Between(1, MOST_REQUESTS)] = 256
    prefix_cache: bool = True  # prompts that begin alike share the cache of what they have in common

    def problems(self) -> Problems:
        if self.max_sequences > self.max_batch_tokens:
            yield (
                "max_sequences",
                f"{self.max_sequences} must not be above max_batch_tokens: each decodes in every step",
            )


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """[watch]: the directory whose quant configs are applied."""

    directory: Path | None = None  # None: nothing is watched
    settle_s: Annotated[float, Between(0, LONGEST_S)] = 0.5  # a file must have stayed the same this long
    rescan_s: Annotated[float, Between(0.1, LONGEST_S)] = 30.0  # at least this often, whatever events tell
    polling: bool = False  # look every `poll_s` seconds instead of waiting for the kernel's events
    poll_s: Annotated[float, Between(0.05, LONGEST_S)] = 2.0


@dataclass(frozen=True, slots=True)
class LogConfig:
    """[log]: what goes to standard error."""

    level: Annotated[str, OneOf(("debug", "info", "warning", "error"))] = "info"
    format: Annotated[str, OneOf(("json", "console"))] = "console"


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """[metrics]: figures for Prometheus, over HTTP."""

    listen: Address | None = None  # None: no metrics; host:port

    def problems(self) -> Problems:
        if self.listen is not None and self.listen.path is not None:
            yield "listen", f"{self.listen} is no TCP address; Prometheus scrapes over HTTP"


@dataclass(frozen=True, slots=True)
class ProofConfig:
    """[models.NAME.proof]: how far a mode may be from the reference on the golden prompts before it is refused.

    The defaults let honest 4-bit noise pass (0.4 nats for a small model) and stop broken weights (several nats).
    """

    max_kl: Annotated[float, Between(0, LARGEST_KL)] = 2.0  # mean KL(reference || mode), nats per token
    min_agreement: Annotated[float, Between(0, 1)] = 0.3  # share of tokens with the same most probable one
    max_worsening: Annotated[float, Between(1, LARGEST_FACTOR)] = (
        4.0  # mean KL of a new set, times that of the serving one
    )
    min_sqnr_db: Annotated[float, Between(-MOST_DB, MOST_DB)] = 5.0  # plain graphs: of the outputs, instead of KL


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """[models.NAME.batching]: which requests to a plain graph share a run."""

    max_size: Annotated[int, Between(1, MOST_BATCH_ROWS)] = 8  # rows of a batch
    max_delay_ms: Annotated[float, Between(0, 60_000)] = 0.0  # a request waits so long for others; 0: only while busy
    preferred_sizes: tuple[Annotated[int, Between(1, MOST_BATCH_ROWS)], ...] = ()  # batches that wait for no more

    def problems(self) -> Problems:
        if too_large := [size for size in self.preferred_sizes if size > self.max_size]:
            yield "preferred_sizes", f"{too_large[0]} must not be above max_size, {self.max_size}"


DEFAULT_RESIDENT = (PrecisionMode.INT4, PrecisionMode.INT8)
DEFAULT_MODE = PrecisionMode.INT4
"""Of language models. A plain graph that is configured so has defaults of its own: `dskd.plain.host`."""


class EngineUse(enum.Enum):
    """Which engines serve a model. OpenVINO always does all that the other one cannot."""

    OPENVINO = "openvino"  # alone
    ONNXRUNTIME = "onnxruntime"  # decodes whenever it can
    AUTO = "auto"  # decodes where that is measured to be faster


class SwapPolicy(enum.Enum):
    """How another parameter set takes the place of the one that serves."""

    AVAILABILITY = "availability"  # built beside it: both are in memory for a moment, and no token waits
    RESOURCE = "resource"  # built after it was released: open requests wait, memory for one is enough


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """[models.NAME]: one model of a store."""

    path: Path
    engine: EngineUse = EngineUse.OPENVINO
    resident: tuple[PrecisionMode, ...] = DEFAULT_RESIDENT
    default_mode: PrecisionMode = DEFAULT_MODE
    load: bool = True  # at start
    threads: Annotated[int, Between(0, 4096)] = 0  # 0: all cores
    kv_precision: Annotated[str, OneOf(("u8", "f16", "bf16", "f32"))] = "u8"
    kv_cache_bytes: Annotated[ByteSize, Between(1, MOST_BYTES)] = field(default=ByteSize(2 << 30))
    slot_bytes: Annotated[ByteSize, Between(1, MOST_BYTES)] = field(default=ByteSize(2 << 30))  # of ONNX Runtime
    weights: WeightLayout = WeightLayout.SHARED
    activation_group: Annotated[int, Between(0, 1 << 16)] = 128  # 0: float activations
    on_demand_ttl_s: Annotated[float, Between(0, LONGEST_S)] = 60.0
    swap: SwapPolicy = SwapPolicy.AVAILABILITY
    keep_generations: Annotated[int, Between(2, 1000)] = 4  # that a rollback can return to, the serving one included
    keep_previous_s: Annotated[float, Between(0, LONGEST_S)] = 0.0  # its graphs stay in memory after a swap
    proof: ProofConfig = ProofConfig()
    batching: BatchingConfig | None = None  # of a plain graph; None: each request is a run of its own
    monitor: MonitorConfig | None = None  # None: [monitor]

    @property
    def options(self) -> CompileOptions:
        """How its graphs are compiled."""
        return CompileOptions(self.threads, self.kv_precision, self.activation_group, self.weights)

    def problems(self) -> Problems:
        if self.default_mode not in self.resident:
            yield "default_mode", f'"{self.default_mode.value}" must be one of the resident modes'
        if self.kv_precision == "bf16" and self.engine is not EngineUse.OPENVINO:
            yield "kv_precision", f'"bf16" keys and values cannot move to ONNX Runtime; engine = "{self.engine.value}"'


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration file."""

    server: ServerConfig = field(default_factory=ServerConfig)
    scheduler: SchedulerConfig = SchedulerConfig()
    watch: WatchConfig = WatchConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    models: dict[str, ModelConfig] = field(default_factory=dict)

    def problems(self) -> Problems:
        for name in self.models:
            if not MODEL_NAME.fullmatch(name):
                yield (
                    f"models.{name}",
                    "a name has letters, digits, '.', '_', '-' and starts with a letter or digit",
                )


def load_config(path: Path | None, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """Reads the file at `path` (None: all defaults); `overrides` replace single keys of its sections.

    Raises ConfigError with all problems of the file.
    """
    table = read_toml(path) if path else {}
    for section, values in (overrides or {}).items():
        present = table.setdefault(section, {})
        if isinstance(present, dict):  # anything else is a problem that the builder names
            present.update(values)
    return build_config(table, path.parent if path else Path.cwd())


def build_config(table: Mapping[str, Any], base: Path) -> Config:
    """The configuration in `table`; relative paths start at `base`. Raises ConfigError with all problems."""
    builder = Builder(base.absolute())
    config = builder.build(Config, table)
    builder.refuse_problems()
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError when it cannot be read or is no TOML."""
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError([f"{path}: {reason}"]) from error
