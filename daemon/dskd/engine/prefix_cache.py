"""Sequences that begin with the same tokens share the blocks of these, if one generation and mode wrote them all.

The keys and values of a token depend on all tokens before it and on the weights that wrote them, and on nothing else
but rounding. Blocks written by other weights look the same and are worth nothing (lmdeploy#4917, sglang#26792).
"""

from __future__ import annotations

from collections.abc import Iterable

from dskd.engine.block_keys import BlockKeys
from dskd.engine.block_pool import BlockPool
from dskd.engine.sequence import NEVER, Sequence


class PrefixCache:
    """Finds the blocks a sequence need not compute, and publishes those it has filled. The pool keeps the blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def reuse(self, sequence: Sequence) -> None:
        """Gives `sequence`, which has no blocks, those that hold its first tokens as its own graph would write them.

        At least one token is left to compute.
        """
        keys = sequence.keys
        if keys is None or keys.written_by != sequence.served_by:
            keys = sequence.keys = BlockKeys(sequence.served_by, self._pool.block_size)
        sequence.blocks = self._pool.share(keys.before_last(sequence.tokens))
        sequence.num_cached = len(sequence.blocks) * self._pool.block_size
        sequence.num_published = len(sequence.blocks)
        sequence.publishes_beyond = len(sequence.tokens)

    def note_writer(self, sequence: Sequence) -> None:
        """Says that what serves `sequence` has written; if it is not what wrote before, no more is published."""
        keys = sequence.keys
        if keys is not None and keys.written_by != sequence.served_by:
            sequence.publishes_beyond = NEVER

    def publish(self, sequences: Iterable[Sequence]) -> None:
        """Lets others use the blocks that `sequences` have filled.

        Not before a token was drawn from logits over them: a block with a value that is not finite would spoil every
        answer that begins as this one does.
        """
        for sequence in sequences:
            if len(sequence.tokens) > sequence.publishes_beyond and sequence.keys is not None:
                self._publish(sequence, sequence.keys.before_last(sequence.tokens))

    def _publish(self, sequence: Sequence, keys: list[bytes]) -> None:
        filled = sequence.blocks[: len(keys)].tolist()
        for index in range(sequence.num_published, len(keys)):
            self._pool.publish(filled[index], keys[index])
        sequence.num_published = len(keys)
        sequence.publishes_beyond = (len(keys) + 1) * self._pool.block_size
