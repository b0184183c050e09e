"""The KV cache of the ONNX graphs: one slot a sequence, keys and values of each layer in one buffer that grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from dskquant.engines.onnxruntime.paged_kv import KVTensor, Pages, read_pages, write_pages
from dskquant.engines.protocol import Int32, KVCache
from dskquant.errors import EngineError

SMALLEST_CAPACITY = 256
"""Tokens; capacities are this times a power of two, or the longest that is allowed."""


@runtime_checkable
class PageTensors(Protocol):
    """A paged cache that shows its tensors, one a layer, as `paged_kv` reads them."""

    @property
    def key_pages(self) -> Sequence[Pages]: ...
    @property
    def value_pages(self) -> Sequence[Pages]: ...


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """What the cache of a model is made of."""

    num_layers: int
    kv_heads: int
    head_dim: int
    context_length: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, keys and values together."""
        return self.num_layers * 2 * self.kv_heads * self.head_dim * np.dtype(np.float32).itemsize


class SlotCache:
    """Keys and values [slots, kv_heads, capacity, head_dim] of every layer; keys are rotated, as the graphs keep them.

    Pages are taken when they are first written. When the capacity grows, the tensors are other ones: `generation`
    counts this, so that nobody keeps on using the old ones.
    """

    def __init__(self, layout: SlotLayout, num_slots: int, longest: int) -> None:
        """`longest`: tokens that a slot may hold, at most the context length."""
        self.layout = layout
        self.num_slots = num_slots
        self.longest = longest
        self.capacity = _bucket(1, longest)
        self.generation = 0
        self.keys = self._tensors()
        self.values = self._tensors()

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.capacity * self.layout.token_bytes

    def reserve(self, length: int) -> None:
        """Sees that every slot has room for `length` tokens. Raises EngineError beyond `longest`."""
        if length <= self.capacity:
            return
        used, self.capacity = self.capacity, _bucket(length, self.longest)
        self.keys = [self._grown(tensor, used) for tensor in self.keys]
        self.values = [self._grown(tensor, used) for tensor in self.values]
        self.generation += 1

    def load(self, slot: int, pages: KVCache, blocks: Int32, begin: int, end: int) -> None:
        """Copies the tokens `begin` (of whole blocks) to `end` of the sequence that lies in `blocks` into a slot.

        `pages` must have `key_pages` and `value_pages`.
        """
        self.reserve(end)
        for found, tensor in self._with_pages(pages):
            read_pages(found, blocks[begin // pages.block_size :], end - begin, tensor[slot, :, begin:])

    def store(self, slot: int, pages: KVCache, blocks: Int32, begin: int, end: int) -> None:
        """Copies the tokens `begin` (of whole blocks) to `end` of a slot into the blocks of their sequence.

        `pages` must have `key_pages` and `value_pages`.
        """
        for found, tensor in self._with_pages(pages):
            write_pages(tensor[slot, :, begin:], end - begin, found, blocks[begin // pages.block_size :])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of a slot to another one: so that those in use can be neighbours."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def _with_pages(self, pages: KVCache) -> Iterator[tuple[Pages, KVTensor]]:
        if not isinstance(pages, PageTensors):
            raise TypeError(f"a {type(pages).__name__} does not show its pages")
        yield from zip(pages.key_pages, self.keys, strict=True)
        yield from zip(pages.value_pages, self.values, strict=True)

    def _tensors(self) -> list[KVTensor]:
        layout = self.layout
        shape = (self.num_slots, layout.kv_heads, self.capacity, layout.head_dim)
        return [np.zeros(shape, np.float32) for _ in range(layout.num_layers)]

    def _grown(self, tensor: KVTensor, used: int) -> KVTensor:
        slots, heads, _, width = tensor.shape
        grown = np.zeros((slots, heads, self.capacity, width), np.float32)
        grown[:, :, :used] = tensor
        return grown


def longest_slot(layout: SlotLayout, num_slots: int, max_bytes: int) -> int:
    """Tokens of the longest slots of which `num_slots` fit into `max_bytes`; at most the context length.

    Raises EngineError when that is less than a slot has to begin with.
    """
    affordable = max_bytes // (num_slots * layout.token_bytes)
    if affordable < min(SMALLEST_CAPACITY, layout.context_length):
        needed = SMALLEST_CAPACITY * num_slots * layout.token_bytes
        raise EngineError(f"{num_slots} KV slots need {needed >> 20} MiB at least; {max_bytes >> 20} MiB are allowed")
    return min(affordable, layout.context_length)


def _bucket(length: int, longest: int) -> int:
    if length > longest:
        raise EngineError(f"a KV slot of {length} tokens is longer than the {longest} it may have")
    capacity = SMALLEST_CAPACITY
    while capacity < length:
        capacity *= 2
    return min(capacity, longest)
