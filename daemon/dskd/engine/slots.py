"""Which sequences lie in KV slots, and how much of them; they come from the blocks of the pool and go back there.

A sequence keeps its blocks while it is in a slot. A block that fills in a slot is written to the pool at once, so that
whoever reads whole blocks (other prompts that begin alike, shadow scoring) finds them there; the tokens after the last
full block follow when the sequence goes on outside of its slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dskd.engine.sequence import Sequence
from dskquant.engines.protocol import KVCache, SlotCache


@dataclass(slots=True)
class Stay:
    """A sequence in a slot."""

    slot: int
    length: int  # leading tokens that the slot holds
    paged: int  # leading tokens that are in the blocks; more than `length` when it has gone on there

    @property
    def is_ahead(self) -> bool:
        """Whether the slot holds tokens that the blocks lack."""
        return self.length > self.paged


class SlotTable:
    """Owns the slots of one cache. Belongs to the step loop's thread."""

    def __init__(self, cache: SlotCache, pages: KVCache) -> None:
        self._cache = cache
        self._pages = pages
        self._stays: dict[Sequence, Stay] = {}

    @property
    def num_slots(self) -> int:
        return self._cache.num_slots

    @property
    def num_used(self) -> int:
        return len(self._stays)

    def fit(self, group: Collection[Sequence]) -> bool:
        """Whether all of `group` can be in slots at once, to their ends."""
        longest = self._cache.longest
        return len(group) <= self.num_slots and all(sequence.max_cached <= longest for sequence in group)

    def missing_tokens(self, group: Iterable[Sequence]) -> int:
        """Tokens that `gather` would have to read from blocks."""
        found = ((sequence, self._stays.get(sequence)) for sequence in group)
        return sum(sequence.num_cached - (stay.length if stay else 0) for sequence, stay in found)

    def gather(self, group: list[Sequence]) -> int:
        """Brings `group`, which fits, with all its cached tokens into neighbouring slots; the first of these."""
        if (first := self._gathered_at(group)) is not None:
            return first
        first = min(range(self.num_slots - len(group) + 1), key=lambda first: self._cost(first, group))
        window = range(first, first + len(group))
        members = set(group)
        for other in [other for other, stay in self._stays.items() if stay.slot in window and other not in members]:
            self.update_blocks(other)
            self.forget(other)
        free = set(window) - {stay.slot for stay in self._stays.values()}
        for sequence in group:
            self._bring(sequence, window, free)
        return first

    def slot_of(self, sequence: Sequence) -> int:
        return self._stays[sequence].slot

    def note_run(self, group: Iterable[Sequence]) -> None:
        """A graph has written the next token of each of `group` into its slot."""
        for sequence in group:
            stay = self._stays[sequence]
            stay.length += 1
            if stay.length % self._pages.block_size == 0:
                self.update_blocks(sequence)

    def update_blocks(self, sequence: Sequence) -> None:
        """Writes to the blocks of `sequence` what they lack, so that it can go on there."""
        stay = self._stays.get(sequence)
        if stay is None or not stay.is_ahead:
            return
        begin = self._block_begin(stay.paged)
        self._cache.store(stay.slot, self._pages, sequence.blocks, begin, stay.length)
        stay.paged = stay.length

    def forget(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that gives its blocks back; nothing happens if it has none."""
        self._stays.pop(sequence, None)

    def clear(self) -> None:
        """Frees all slots."""
        self._stays.clear()

    def _gathered_at(self, group: list[Sequence]) -> int | None:
        """The first slot of `group` if it is where and how it should be, as it is from step to step."""
        found = ((sequence, self._stays.get(sequence)) for sequence in group)
        slots = [stay.slot for sequence, stay in found if stay and stay.length == sequence.num_cached]
        is_gathered = len(slots) == len(group) and max(slots) - min(slots) == len(group) - 1
        return min(slots) if is_gathered else None

    def _cost(self, first: int, group: list[Sequence]) -> int:
        """Tokens that must be copied or read again to have `group` in the slots from `first` on."""
        window = range(first, first + len(group))
        members = set(group)
        return sum(stay.length for other, stay in self._stays.items() if (stay.slot in window) != (other in members))

    def _bring(self, sequence: Sequence, window: range, free: set[int]) -> None:
        stay = self._stays.get(sequence)
        if stay is None:
            stay = self._stays[sequence] = Stay(free.pop(), 0, 0)
        elif stay.slot not in window:
            source, stay.slot = stay.slot, free.pop()
            self._cache.copy(source, stay.slot, stay.length)
        if stay.length < sequence.num_cached:
            begin = self._block_begin(stay.length)
            self._cache.load(stay.slot, self._pages, sequence.blocks, begin, sequence.num_cached)
            stay.length = stay.paged = sequence.num_cached

    def _block_begin(self, token: int) -> int:
        return token - token % self._pages.block_size
