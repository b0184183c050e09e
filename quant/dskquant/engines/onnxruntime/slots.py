"""The KV cache of the ONNX graphs: one slot a sequence, keys and values of each layer in one buffer that grows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dskquant.engines.protocol import Int32, Int64
from dskquant.errors import EngineError

SMALLEST_CAPACITY = 256
"""Tokens; capacities are this times a power of two, or the context length of the model."""

KVTensor = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """One run of a graph for B neighbouring slots, S new tokens each, padded on the right.

    A decode step has S = 1; a prefill chunk B = 1 and its own S. A slot with `new_lens` 0 sits the step out: its cache
    is not touched, and its rows mean nothing.
    """

    first_slot: int
    token_ids: Int64  # [B, S]
    past_lens: Int32  # [B] tokens already in the slot
    new_lens: Int32  # [B] tokens of the row that are no padding
    residual_rows: Int64  # [R, 2] (b, s) of the tokens that also use the residual plane (INT8)
    logit_rows: Int64  # [L, 2] (b, s) of the tokens whose logits are wanted

    @property
    def longest(self) -> int:
        """Tokens that the fullest slot must have room for, padding included."""
        return int(self.past_lens.max() + self.token_ids.shape[1])


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

    def __init__(self, layout: SlotLayout, num_slots: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.capacity = _bucket(1, layout.context_length)
        self.generation = 0
        self.keys = self._tensors()
        self.values = self._tensors()

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.capacity * self.layout.token_bytes

    def reserve(self, length: int) -> None:
        """Sees that every slot has room for `length` tokens. Raises EngineError beyond the context of the model."""
        if length <= self.capacity:
            return
        used, self.capacity = self.capacity, _bucket(length, self.layout.context_length)
        self.keys = [self._grown(tensor, used) for tensor in self.keys]
        self.values = [self._grown(tensor, used) for tensor in self.values]
        self.generation += 1

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of a slot to another one: so that those in use can be neighbours."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def _tensors(self) -> list[KVTensor]:
        layout = self.layout
        shape = (self.num_slots, layout.kv_heads, self.capacity, layout.head_dim)
        return [np.zeros(shape, np.float32) for _ in range(layout.num_layers)]

    def _grown(self, tensor: KVTensor, used: int) -> KVTensor:
        slots, heads, _, width = tensor.shape
        grown = np.zeros((slots, heads, self.capacity, width), np.float32)
        grown[:, :, :used] = tensor
        return grown


def _bucket(length: int, context_length: int) -> int:
    if length > context_length:
        raise EngineError(f"a KV slot of {length} tokens is longer than the context of {context_length}")
    capacity = SMALLEST_CAPACITY
    while capacity < length:
        capacity *= 2
    return min(capacity, context_length)
