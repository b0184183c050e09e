"""Quant configs: small TOML files that say which parameter set, layer precisions and mode a model shall serve with.

    model = "smollm2"
    precision = "int4"                # optional: the mode
    in_flight = "migrate"             # optional: or "finish"

    [params]                          # optional: a parameter set; relative paths start at the file's directory
    file = "calibrated-2026-11"
    sha256 = "9f86d0..."              # optional: of its manifest.json

    [[layers]]                        # optional: linear layers that INT4 computes in another precision
    match = "*.down_proj.weight"
    precision = "int8"

    [monitor]                         # optional: keys of [monitor] that are different for this model
    scope = "request"
    threshold.int4 = 0.3

They come from the watched directory, from `dskctl apply` and over RPC, and mean the same everywhere.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tomli

from dskd import typed_json
from dskd.engine.request import InFlight
from dskd.manager.types import Change, SetReference
from dskd.monitor.config import MonitorConfig
from dskd.typed_toml import Builder, ConfigError, OneOf
from dskd.units import format_bytes
from dskquant.modes import PrecisionMode
from dskquant.scheme import LAYER_PRECISIONS, LayerRule

MAX_BYTES = 512 << 10
MAX_LAYER_RULES = 10_000
"""They fit into `MAX_BYTES`, with short patterns."""

SHA256 = re.compile(r"[0-9a-f]{64}|")

Problems = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ParamsConfig:
    """[params]: a parameter set on this machine."""

    file: Path  # its directory or its manifest; absolute
    sha256: str = ""  # of its manifest; "": whatever is there

    def problems(self) -> Problems:
        if "\0" in str(self.file):
            yield "file", "a path has no NUL"
        if not SHA256.fullmatch(self.sha256):
            yield "sha256", "allowed: 64 hexadecimal digits in lower case"

    @property
    def reference(self) -> SetReference:
        return SetReference(self.file, self.sha256)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """What a model shall serve with; None and () say nothing about it."""

    model: str
    precision: PrecisionMode | None = None
    in_flight: InFlight | None = None
    params: ParamsConfig | None = None
    layers: tuple[LayerRule, ...] = ()  # the last one that matches a layer wins
    monitor: Mapping[str, Any] = field(default_factory=dict)  # as the file has it; see `overridden`


@dataclass(frozen=True, slots=True)
class _LayerTable:
    """[[layers]] as a file has it."""

    match: str
    precision: Annotated[str, OneOf(tuple(mode.value for mode in LAYER_PRECISIONS))]

    @property
    def rule(self) -> LayerRule:
        return LayerRule(self.match, PrecisionMode(self.precision))


def _partial(cls: type[Any]) -> Any:
    """Like the dataclass `cls`, but every key may be missing, in tables inside it too, and each is checked alone."""
    hints = typing.get_type_hints(cls, include_extras=True)
    items = [(name, _partial_hint(hint) | None, field(default=None)) for name, hint in hints.items()]
    return make_dataclass(f"Partial{cls.__name__}", items, frozen=True)


def _partial_hint(hint: Any) -> Any:
    options = typing.get_args(hint) or (hint,)  # of X | None, that are X and None
    tables = [option for option in options if isinstance(option, type) and is_dataclass(option)]
    return _partial(tables[0]) if tables else hint


_PartialMonitor = _partial(MonitorConfig)


@dataclass(frozen=True, slots=True)
class _Tables:
    """A whole file."""

    model: str
    precision: PrecisionMode | None = None
    in_flight: InFlight | None = None
    params: ParamsConfig | None = None
    layers: tuple[_LayerTable, ...] = ()
    monitor: _PartialMonitor | None = None  # type: ignore[valid-type]  # checked by it, kept as the file has it

    def problems(self) -> Problems:
        if not self.model:
            yield "model", "the name of a model is needed"


def parse(text: str, name: str, base: Path) -> QuantConfig:
    """The config in `text`, the content of the file `name`; relative paths start at `base`.

    Raises ConfigError with the problems of the file; each begins with `name` and the field.
    """
    try:
        size = len(text.encode("utf-8"))
        if size > MAX_BYTES:
            raise ConfigError([f"has {size} bytes; at most {format_bytes(MAX_BYTES)} are allowed"])
        config = from_table(tomli.loads(text), base)
        if len(config.layers) > MAX_LAYER_RULES:
            raise ConfigError([f"layers: {len(config.layers)} rules; at most {MAX_LAYER_RULES} are allowed"])
    except ConfigError as error:
        raise ConfigError((f"{name}: {problem}" for problem in error.problems), error.more) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{name}: {error}"]) from error
    return config


def from_table(table: Mapping[str, Any], base: Path) -> QuantConfig:
    """The config in a parsed file. Raises ConfigError with its problems."""
    builder = Builder(base.absolute())
    tables = builder.build(_Tables, table)
    builder.refuse_problems()
    rules = tuple(layer.rule for layer in tables.layers)
    monitor = table.get("monitor", {})
    return QuantConfig(tables.model, tables.precision, tables.in_flight, tables.params, rules, monitor)


def to_table(config: QuantConfig) -> dict[str, Any]:
    """What `from_table` reads back; JSON values."""
    table: dict[str, Any] = {"model": config.model}
    if config.precision:
        table["precision"] = config.precision.value
    if config.in_flight:
        table["in_flight"] = config.in_flight.value
    if config.params:
        table["params"] = {"file": str(config.params.file), "sha256": config.params.sha256}
    if config.layers:
        table["layers"] = [{"match": rule.match, "precision": rule.precision.value} for rule in config.layers]
    if config.monitor:
        table["monitor"] = dict(config.monitor)
    return table


def merge(configs: Sequence[tuple[str, QuantConfig]]) -> QuantConfig:
    """The configs of one model as one, as in a `.d` directory: in the order of their file names.

    Later files override single keys (`params` as a whole, `monitor` key by key); layer rules are concatenated.
    Raises ValueError when there is none, or when they are of several models.
    """
    ordered = [config for _, config in sorted(configs, key=lambda item: item[0])]
    if len({config.model for config in ordered}) != 1:
        raise ValueError("only configs of one model can be merged")
    merged = ordered[0]
    for config in ordered[1:]:
        merged = replace(
            merged,
            precision=config.precision or merged.precision,
            in_flight=config.in_flight or merged.in_flight,
            params=config.params or merged.params,
            layers=merged.layers + config.layers,
            monitor=_merged(merged.monitor, config.monitor),
        )
    return merged


def overridden(base: MonitorConfig, table: Mapping[str, Any]) -> MonitorConfig:
    """`base` with the keys in `table`, the [monitor] of a quant config; tables inside it are merged key by key.

    Raises ConfigError with all problems: keys that do not fit together, or that are missing beside others.
    """
    builder = Builder(Path.cwd())
    config = builder.build(MonitorConfig, _merged(_without_none(typed_json.dump(base)), table), "monitor")
    builder.refuse_problems()
    return config


def _merged(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(table)
    for key, value in over.items():
        former = merged.get(key, {})
        merged[key] = _merged(former, value) if isinstance(value, Mapping) else value
    return merged


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null."""
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def difference(before: QuantConfig | None, after: QuantConfig | None, default_mode: PrecisionMode) -> Change:
    """What to change of a model that serves with `before` so that it serves with `after`; None: no config.

    A key that is gone is taken back: to the set of the model's own store, no layer rules, the default mode.
    """
    old, new = before or QuantConfig(""), after or QuantConfig("")
    mode = parameters = layers = monitor = None
    if new.precision is not old.precision:
        mode = new.precision or default_mode
    if new.params != old.params:
        parameters = new.params.reference if new.params else SetReference(None)
    if new.layers != old.layers:
        layers = new.layers
    if new.monitor != old.monitor:
        monitor = new.monitor
    return Change(mode, parameters, layers, new.in_flight or InFlight.MIGRATE, monitor)
