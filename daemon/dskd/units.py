"""Amounts of memory as people write and read them."""

from __future__ import annotations

import math
import re
from pathlib import Path

_FACTORS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class ByteSize(int):
    """A number of bytes; in files an integer or a string such as "512MiB"."""

    @classmethod
    def from_toml(cls, value: object, base: Path) -> ByteSize:
        """Reads `value`. Raises ValueError unless it is a positive integer or a string with a binary unit."""
        size = _parse(value) if isinstance(value, str) else value
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError('allowed: a positive number of bytes, or a string with a unit such as "512MiB" or "2GiB"')
        return cls(size)


def _parse(text: str) -> int | None:
    match = _AMOUNT.fullmatch(text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    amount = float(match[1]) * factor if match and factor else math.inf
    return int(amount) if amount < math.inf else None


def format_bytes(amount: int) -> str:
    """`amount` bytes in the largest binary unit that leaves at least one, for example "1.5 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _FACTORS[unit.upper()]
        if amount >= factor:
            return f"{amount / factor:.1f} {unit}"
    return f"{amount} B"
