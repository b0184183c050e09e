"""Tells what stands still from what is being written."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class _Sighting:
    value: Hashable
    since: float


ABSENT: Final = None


class Settling:
    """The settled value of each key: the last one that stayed the same for `settle_s` seconds.

    Absence is a value as well: a file that is replaced by removing and writing it again is never seen as gone.
    """

    def __init__(self, settle_s: float, settled: Mapping[str, Hashable] | None = None) -> None:
        self._settle_s = settle_s
        self._settled: dict[str, Hashable] = dict(settled or {})
        self._moving: dict[str, _Sighting] = {}

    @property
    def moving(self) -> Collection[str]:
        """Keys whose value has not settled yet."""
        return self._moving.keys()

    def settled(self, key: str) -> Hashable:
        """The settled value of `key`; None when it is absent."""
        return self._settled.get(key, ABSENT)

    def observe(self, now: float, values: Mapping[str, Hashable], held: Collection[str] = ()) -> list[str]:
        """Takes in the values seen at `now`; returns the keys that settled into another value by that, in order.

        Keys in `held` do not settle, however long they stay the same. No value may be None.
        """
        keys = values.keys() | self._settled.keys() | self._moving.keys()
        return [key for key in sorted(keys) if self._observe(key, values.get(key, ABSENT), now, key in held)]

    def start_over(self) -> None:
        """What has not settled has to stay the same anew."""
        self._moving.clear()

    def _observe(self, key: str, value: Hashable, now: float, held: bool) -> bool:
        if value == self.settled(key):
            self._moving.pop(key, None)
            return False
        sighting = self._moving.get(key)
        if sighting is None or sighting.value != value:
            sighting = self._moving[key] = _Sighting(value, now)
        if held or now - sighting.since < self._settle_s:
            return False
        del self._moving[key]
        self._settle(key, value)
        return True

    def _settle(self, key: str, value: Hashable) -> None:
        if value is ABSENT:
            self._settled.pop(key, None)
        else:
            self._settled[key] = value
