"""Frozen dataclasses as JSON and back, every value checked against the type of its field.

Enums are written as their values, tuples as lists. NaN and infinities are written as Python's json does.
"""

from __future__ import annotations

import enum
import functools
import json
import reprlib
import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def dump(value: Any) -> dict[str, Any]:
    """The dataclass `value` as what `json.dumps` takes."""
    return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return dump(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises ValueError for anything else."""
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return _require(dict, value, "")


def load(cls: type[T], table: dict[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls`. Raises ValueError, naming the key, for what its fields do not allow."""
    known: dict[str, tuple[Field[Any], Any]] = _fields(cls)  # type: ignore[arg-type]  # classes are hashable
    if odd := sorted(table.keys() - known.keys()):
        raise ValueError(f"unknown keys: {', '.join(_join(where, key) for key in odd)}")
    if missing := sorted(name for name, (item, _) in known.items() if name not in table and _is_required(item)):
        raise ValueError(f"missing keys: {', '.join(_join(where, name) for name in missing)}")
    return cls(**{name: _value(known[name][1], value, _join(where, name)) for name, value in table.items()})


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return {item.name: (item, hints[item.name]) for item in fields(cls)}


def _is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _value(hint: Any, value: Any, where: str) -> Any:
    if type(value) is hint:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):  # X | None
        return None if value is None else _value(arguments[0], value, where)
    if origin is tuple:
        listed = enumerate(_require(list, value, where))
        return tuple(_value(arguments[0], item, f"{where}[{index}]") for index, item in listed)
    if origin is dict:
        items = _require(dict, value, where).items()
        return {_value(arguments[0], key, where): _value(arguments[1], item, _join(where, key)) for key, item in items}
    if is_dataclass(hint):
        return load(typing.cast("type[Any]", hint), _require(dict, value, where), where)
    if issubclass(hint, enum.Enum):
        return _member(hint, value, where)
    if hint is float and type(value) is int and abs(value) <= 2**53:
        return float(value)
    return _require(hint, value, where)


def _require(kind: type[T], value: Any, where: str) -> T:
    if type(value) is not kind:
        raise ValueError(f"{where or 'the whole'}: must be of type {kind.__name__}, not {reprlib.repr(value)}")
    return value


def _member(hint: type[enum.Enum], value: Any, where: str) -> enum.Enum:
    try:
        return hint(value)
    except ValueError:
        allowed = ", ".join(str(member.value) for member in hint)
        raise ValueError(f"{where}: must be one of {allowed}, not {reprlib.repr(value)}") from None


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
