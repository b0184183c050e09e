"""Builds frozen dataclasses from the tables of a TOML file and reports every problem of the file at once.

The fields of the dataclass are the only description of a section: their names are the keys, their types say what is
allowed, their defaults what is used otherwise. A type that reads itself has a `from_toml(value, base)` class method.
`Annotated[T, constraint]` adds a `Constraint`; a `problems()` method of the dataclass checks several fields together.
"""

from __future__ import annotations

import difflib
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


LARGEST_INTEGER = 1 << 63
"""TOML has integers of 64 bits; its reader takes longer ones, which are no floats and no JSON."""

TOLD_PROBLEMS = 20
"""Of one file, which may have thousands: to find the nearest known key of each takes a minute."""


class ConfigError(Exception):
    """A configuration cannot be used; one entry of `problems` for each thing to repair.

    There are `more` that are not told.
    """

    def __init__(self, problems: Iterable[str], more: int = 0) -> None:
        self.problems = tuple(problems)
        self.more = more
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> list[str]:
        """The problems, and how many more there are."""
        return [*self.problems, *([f"and {self.more} more"] if self.more else [])]


class Constraint(Protocol):
    """Narrows the values of a type."""

    def allows(self, value: Any) -> bool: ...
    def __str__(self) -> str:
        """What is allowed, after the word "allowed:"."""
        ...


@dataclass(frozen=True)
class Between:
    """Numbers from `low` to `high`, both allowed."""

    low: float
    high: float = math.inf

    def allows(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high)

    def __str__(self) -> str:
        return f"at least {self.low}" if self.high == math.inf else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class OneOf:
    """One of a few values."""

    choices: tuple[Any, ...]

    def allows(self, value: Any) -> bool:
        return value in self.choices

    def __str__(self) -> str:
        return ", ".join(_spell(choice) for choice in self.choices)


_NO_VALUE: Any = object()


class Builder:
    """Builds dataclasses and gathers problems, of which the first are told; relative paths start at `base`."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.problems: list[str] = []
        self._found = 0

    def refuse_problems(self) -> None:
        """Raises ConfigError when a problem was noted."""
        if self.problems:
            raise ConfigError(self.problems, self._found - len(self.problems))

    def build(self, cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
        """An instance of the dataclass `cls`, or a meaningless value after a problem was noted."""
        known, hints = _described(cls)  # type: ignore[arg-type]  # classes are hashable
        found_before = self._found
        for key in table:
            if key not in known:
                self._note(where, key, functools.partial(_unknown_key, key, known))
        values = {name: self._field(item, hints[name], table, where) for name, item in known.items()}
        if self._found > found_before:
            return typing.cast(T, _NO_VALUE)
        built = cls(**{name: value for name, value in values.items() if value is not _NO_VALUE})
        if hasattr(built, "problems"):
            for key, problem in built.problems():
                self._note(where, key, problem)
        return built

    def _field(self, item: Field[Any], hint: Any, table: Mapping[str, Any], where: str) -> Any:
        if item.name in table:
            return self._value(hint, table[item.name], _join(where, item.name))
        if item.default is MISSING and item.default_factory is MISSING:
            self._note(where, item.name, "is missing")
        return _NO_VALUE

    def _value(self, hint: Any, value: Any, path: str) -> Any:
        """`value` as the type `hint`, tables and lists inside it included."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._value(arguments[0], value, path)  # X | None: TOML has no null
        if hasattr(hint, "__dataclass_fields__") and isinstance(value, Mapping):
            return self.build(hint, value, path)
        if origin is dict and isinstance(value, Mapping):
            return {key: self._value(arguments[1], item, _join(path, key)) for key, item in value.items()}
        if origin is tuple and isinstance(value, list):
            return tuple(self._value(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(value))
        try:
            return _scalar(hint, value, self.base)
        except ValueError as wrong:
            reason = str(wrong)
            self._add(lambda: f"{path} = {_spell(value)}: {reason}")
            return _NO_VALUE

    def _note(self, where: str, key: str, problem: str | Callable[[], str]) -> None:
        self._add(lambda: f"{_join(where, _cut(key))}: {problem if isinstance(problem, str) else problem()}")

    def _add(self, describe: Callable[[], str]) -> None:
        self._found += 1
        if len(self.problems) < TOLD_PROBLEMS:
            self.problems.append(describe())


@functools.cache  # a file may have thousands of tables of one class
def _described(cls: Any) -> tuple[dict[str, Field[Any]], dict[str, Any]]:
    """The fields of a dataclass and their types, by name."""
    return {item.name: item for item in fields(cls)}, typing.get_type_hints(cls, include_extras=True)


def _scalar(hint: Any, value: Any, base: Path) -> Any:
    if type(value) is int and not -LARGEST_INTEGER <= value < LARGEST_INTEGER:
        raise ValueError("allowed: numbers of at most 64 bits")
    if typing.get_origin(hint) is typing.Annotated:
        kind, constraint = typing.get_args(hint)
        return _constrained(_scalar(kind, value, base), constraint)
    if hasattr(hint, "from_toml"):
        return hint.from_toml(value, base)
    if hint is float and type(value) is int:
        return float(value)
    if hint is Path and isinstance(value, str) and value:
        return base / _expanded(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(_constrained(value, OneOf(tuple(member.value for member in hint))))
    if type(value) is not hint:
        raise ValueError(f"allowed: {_describe(hint)}")
    return value


def _expanded(text: str) -> Path:
    """`text` as a path, "~" and "~user" replaced. Raises ValueError when there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"allowed: a path; {error}") from error


def _constrained(value: Any, constraint: Constraint) -> Any:
    if not constraint.allows(value):
        raise ValueError(f"allowed: {constraint}")
    return value


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is dict or hasattr(hint, "__dataclass_fields__"):
        return "a table"
    if origin is tuple:
        return "a list"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
    return names[hint]


def _spell(value: Any) -> str:
    """`value` as TOML would have it, cut to a readable length."""
    if isinstance(value, str):
        return _cut(f'"{value}"')
    try:
        return _cut(str(value).lower() if isinstance(value, bool) else str(value))
    except ValueError:  # Python spells no integers of more than 4300 digits; hexadecimal ones can be read
        return "a huge number"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _unknown_key(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key; known: {', '.join(sorted(known))}"
