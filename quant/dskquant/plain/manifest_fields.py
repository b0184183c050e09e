"""Typed access to an untrusted manifest.json, with errors that name the file and the whole path of the field."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dskquant.errors import StoreError
from dskquant.fields import is_text

MOST_BYTES = 2 << 20
"""Of a manifest. While JSON is read, all other threads wait."""

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ManifestFields:
    """A table of the manifest at `file`; `where` is the path of its keys, "" or such as "graphs.int8."."""

    values: Mapping[str, Any]
    file: Path
    where: str = ""

    def check_keys(self, *known: str) -> None:
        """Raises StoreError for a key that is missing or unknown."""
        for key in known:
            if key not in self.values:
                raise self.refusal(key, "is missing")
        for key in self.values:
            if key not in known:
                raise self.refusal(key, f"is unknown; known: {', '.join(known)}")

    def equals(self, key: str, wanted: object) -> None:
        self.one_of(key, (wanted,))

    def one_of(self, key: str, allowed: Sequence[Any]) -> Any:
        value = self.values[key]
        if not any(type(value) is type(each) and value == each for each in allowed):
            told = ", ".join(json.dumps(each) for each in allowed)
            raise self.refusal(key, f"is {reprlib.repr(value)}; allowed: {told}")
        return value

    def text(self, key: str, longest: int) -> str:
        value = self.values[key]
        if not is_text(value) or not 0 < len(value) <= longest:
            raise self.refusal(key, f"must be a text of 1 to {longest} characters, not {reprlib.repr(value)}")
        return str(value)

    def sha256(self, key: str) -> str:
        value = self.values[key]
        if not isinstance(value, str) or not SHA256.fullmatch(value):
            raise self.refusal(key, f"must be 64 hexadecimal digits, not {reprlib.repr(value)}")
        return value

    def count(self, key: str, least: int, most: int) -> int:
        value = self.values[key]
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(key, f"must be a whole number from {least} to {most}, not {reprlib.repr(value)}")
        return value

    def number(self, key: str, least: float, most: float) -> float:
        value = self.values[key]
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.refusal(key, f"must be a number from {least:g} to {most:g}, not {reprlib.repr(value)}")
        return float(value)

    def sizes(self, key: str, most: int, largest: int) -> tuple[int | None, ...]:
        """At most `most` sizes of dimensions, null where any is allowed."""
        value = self.values[key]
        if not isinstance(value, list) or len(value) > most:
            raise self.refusal(key, f"must be a list of at most {most} sizes, not {reprlib.repr(value)}")
        for size in value:
            if size is not None and (type(size) is not int or not 0 < size <= largest):
                raise self.refusal(key, f"has {reprlib.repr(size)}; allowed: null or a number from 1 to {largest}")
        return tuple(value)

    def table(self, key: str) -> ManifestFields:
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.refusal(key, f"must be a table, not {reprlib.repr(value)}")
        return ManifestFields(value, self.file, f"{self.where}{key}.")

    def tables(self, key: str, most: int) -> list[ManifestFields]:
        value = self.values[key]
        if not isinstance(value, list) or not 0 < len(value) <= most:
            raise self.refusal(key, f"must be a list of 1 to {most} tables, not {reprlib.repr(value)}")
        for number, item in enumerate(value):
            if not isinstance(item, dict):
                raise self.refusal(f"{key}[{number}]", f"must be a table, not {reprlib.repr(item)}")
        return [ManifestFields(item, self.file, f"{self.where}{key}[{number}].") for number, item in enumerate(value)]

    def refusal(self, key: str, message: str) -> StoreError:
        return StoreError(f"{self.file}: {self.where}{reprlib.repr(key)[1:-1]} {message}")


def read_json(path: Path) -> ManifestFields:
    """The table in the file at `path`. Raises StoreError when there is none that can be read."""
    try:
        if not path.is_file():  # reading a pipe would wait for ever
            raise StoreError(f"{path}: missing; make a store with `dskquant convert`")
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise StoreError(f"{path}: has more than {MOST_BYTES} bytes")
        raw = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise StoreError(f"{path}: is not a table")
    return ManifestFields(raw, path)
