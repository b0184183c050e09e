"""Typed access to the keys of an untrusted configuration, with errors that name file and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dskquant.errors import SourceError

LARGEST_COUNT = 1 << 31
LARGEST_NUMBER = 1e30


def is_text(value: object) -> bool:
    """Whether `value` is a text that can be sent: JSON may hide half a surrogate pair in one."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping read from `where`. A key that is absent or null takes the default; without a default it is an error."""

    values: Mapping[str, Any]
    where: str

    def count(self, key: str, default: int | None = None, largest: int = LARGEST_COUNT) -> int:
        """A positive whole number."""
        value = self._value(key, default)
        if type(value) is not int or not 0 < value <= largest:
            raise self.refusal(key, f"must be a whole number from 1 to {largest}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value <= LARGEST_NUMBER:
            raise self.refusal(key, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.refusal(key, f"must be true or false, not {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when absent."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and 0 <= item < LARGEST_COUNT for item in ids):
            raise self.refusal(key, f"must be a token id or a list of them, not {value!r}")
        return tuple(ids)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def refusal(self, key: str, message: str) -> SourceError:
        return SourceError(f"{self.where}: {key} {message}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.refusal(key, "is missing")
        return value
