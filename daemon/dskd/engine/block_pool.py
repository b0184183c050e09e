"""Which blocks of the KV cache are free, which have owners, and which are kept for whoever needs what they hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dskd.errors import InternalError
from dskquant.engines.protocol import Int32


class BlockPool:
    """Hands out the block ids 0..num_blocks-1. Blocks given back last are handed out first: their pages are warm.

    A block that was published under a key can have several owners, and is kept when the last of them has gone. Kept
    blocks are as good as free: they are handed out, the least recently used first, when no other is left.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: dict[int, None] = {}  # an ordered set: published, without an owner, the least recently used first
        self._num_owners = [0] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those that are kept included."""
        return len(self._free) + len(self._kept)

    @property
    def num_published(self) -> int:
        """Blocks that can be shared, with an owner or without."""
        return len(self._by_key)

    def num_owners(self, block: int) -> int:
        return self._num_owners[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> Int32:
        """`count` block ids [count] that nobody else has. Raises InternalError if fewer are free: ask first."""
        if count > self.num_free:
            raise InternalError(f"{count} KV blocks wanted, {self.num_free} free")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._num_owners[block] = 1
        return np.array(taken, np.int32)

    def append(self, blocks: Int32, num_tokens: int) -> Int32:
        """A block table that begins with `blocks` and holds `num_tokens` tokens; `blocks` itself if it already does."""
        missing = self.blocks_for(num_tokens) - len(blocks)
        return np.concatenate((blocks, self.allocate(missing))) if missing > 0 else blocks

    def publish(self, block: int, key: bytes) -> None:
        """Makes `block`, which is out and will not be written again, known by `key`.

        The first block of a key stays the one that is shared; others that hold the same are given back as any other.
        """
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def share(self, keys: Iterable[bytes]) -> Int32:
        """The blocks of `keys`, up to the first key that has none; the caller is one more owner of them."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            self._num_owners[block] += 1
            self._kept.pop(block, None)
            blocks.append(block)
        return np.array(blocks, np.int32)

    def hold(self, blocks: Int32) -> None:
        """Adds one more owner to `blocks`, which are out."""
        for block in blocks.tolist():
            self._num_owners[block] += 1

    def free(self, blocks: Int32) -> None:
        """Takes blocks back from one owner. Raises InternalError, and takes none, if one of them is not out."""
        ids = blocks.tolist()
        if len(set(ids)) != len(ids) or not all(self._num_owners[block] for block in ids):
            raise InternalError(f"KV blocks {ids} given back that are not out")
        for block in reversed(ids):  # the last block of a prefix is of no use without the first, and is evicted before
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            if block in self._key_of:
                self._kept[block] = None
            else:
                self._free.append(block)

    def check(self) -> None:
        """Raises InternalError unless every block is out, kept or free, exactly once, and keys and blocks are pairs."""
        free = set(self._free)
        is_sound = len(free) == len(self._free) and free.isdisjoint(self._kept) and free.isdisjoint(self._key_of)
        is_sound &= self._num_owners.count(0) == self.num_free
        is_sound &= not any(map(self._num_owners.__getitem__, [*self._free, *self._kept]))
        is_sound &= len(self._by_key) == len(self._key_of) and self._kept.keys() <= self._key_of.keys()
        is_sound &= all(self._by_key.get(key) == block for block, key in self._key_of.items())
        if not is_sound:
            raise InternalError("the KV block pool is damaged")

    def _evict(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        del self._by_key[self._key_of.pop(block)]
        return block
