"""What a full block of the KV cache is known by: all tokens up to its end, and what wrote them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from dskquant.modes import PrecisionMode

KEY_BYTES = 16
"""128 bits of BLAKE2b (RFC 7693), which resists collisions: it takes 2^64 tries to find two prefixes with one key on
purpose, and among 10^12 blocks two meet by accident with a probability below 10^-14. So equal keys are equal prefixes,
and the tokens are not kept to be compared."""


class BlockKeys:
    """The keys of one sequence's blocks. Each is made once, from the key before it and the tokens of its block.

    The first follows from `written_by`, generation and mode: the same tokens have other keys when something else wrote
    them, and a key says of every token before it, too, that the same wrote it.
    """

    __slots__ = ("_block_size", "_keys", "_last", "written_by")

    def __init__(self, written_by: tuple[int, PrecisionMode], block_size: int) -> None:
        generation, mode = written_by
        self.written_by = written_by
        self._block_size = block_size
        self._keys: list[bytes] = []
        self._last = _digest(f"{generation} {mode.value}".encode())

    def before_last(self, tokens: Sequence[int]) -> list[bytes]:
        """Keys of the full blocks that lie before the last one of `tokens`, which have only grown since the last call.

        The last token is never in: it is yet to be computed, or to be computed again, to know what follows it.
        """
        size = self._block_size
        for end in range((len(self._keys) + 1) * size, len(tokens), size):
            # Eight bytes for each token: no two lists of tokens are the same bytes.
            self._last = _digest(self._last + array("q", tokens[end - size : end]).tobytes())
            self._keys.append(self._last)
        return self._keys


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=KEY_BYTES).digest()
