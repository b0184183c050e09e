"""Which blocks of the KV cache are free."""

from __future__ import annotations

import numpy as np

from dskd.errors import InternalError
from dskquant.engines.protocol import Int32


class BlockPool:
    """Hands out the block ids 0..num_blocks-1. Blocks given back last are handed out first: their pages are warm."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> Int32:
        """`count` block ids [count] that nobody else has. Raises InternalError if fewer are free: ask first."""
        if count > len(self._free):
            raise InternalError(f"{count} KV blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_used[block] = 1
        return np.array(taken, np.int32)

    def append(self, blocks: Int32, num_tokens: int) -> Int32:
        """A block table that begins with `blocks` and holds `num_tokens` tokens; `blocks` itself if it already does."""
        missing = self.blocks_for(num_tokens) - len(blocks)
        return np.concatenate((blocks, self.allocate(missing))) if missing > 0 else blocks

    def free(self, blocks: Int32) -> None:
        """Takes blocks back. Raises InternalError, and takes none, if one of them is not out."""
        ids = blocks.tolist()
        if len(set(ids)) != len(ids) or not all(self._is_used[block] for block in ids):
            raise InternalError(f"KV blocks {ids} given back that are not out")
        for block in ids:
            self._is_used[block] = 0
        self._free.extend(reversed(ids))

    def check(self) -> None:
        """Raises InternalError unless every block is either out or free, exactly once."""
        free = set(self._free)
        is_sound = len(free) == len(self._free) and len(free) + sum(self._is_used) == self.num_blocks
        if not is_sound or any(self._is_used[block] for block in free):
            raise InternalError("the KV block pool is damaged")
