"""The block pool loses no block, and gives one to several owners only by a key that tells what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dskd.engine.block_pool import BlockPool
from dskd.errors import InternalError
from dskquant.engines.protocol import Int32

NUM_BLOCKS = 12
BLOCK_SIZE = 4
KEYS = [bytes([letter]) for letter in b"abcdef"]


def test_a_token_more_than_a_block_needs_a_second_block() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_blocks_given_back_last_are_handed_out_first() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    first, second = pool.allocate(3), pool.allocate(2)
    pool.free(first)
    assert pool.allocate(3).tolist() == first.tolist()
    assert second.tolist() == [3, 4]


def test_append_takes_a_block_only_when_the_last_one_is_full() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    table = pool.append(pool.allocate(1), 4)
    assert len(table) == 1
    longer = pool.append(table, 5)
    assert longer.tolist()[:1] == table.tolist()
    assert len(longer) == 2


def test_more_blocks_than_are_free_are_refused_and_none_is_taken() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.allocate(10)
    with pytest.raises(InternalError, match="3 KV blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("blocks", [[0, 0], [0, 5]], ids=["twice", "never taken"])
def test_a_block_that_is_not_out_cannot_be_given_back(blocks: list[int]) -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.allocate(2)
    with pytest.raises(InternalError, match="not out"):
        pool.free(np.array(blocks, np.int32))
    assert pool.num_free == NUM_BLOCKS - 2
    pool.check()


def published(pool: BlockPool, *keys: bytes) -> Int32:
    """Blocks that are out, and known by `keys`."""
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks.tolist(), keys, strict=True):
        pool.publish(block, key)
    return blocks


def test_a_published_block_is_found_by_its_key_while_it_is_out_and_after() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    blocks = published(pool, b"a", b"b")
    assert pool.share([b"a", b"b", b"c"]).tolist() == blocks.tolist()
    pool.free(blocks)
    assert pool.num_free == NUM_BLOCKS - 2, "the second owner still has them"
    pool.free(blocks)
    assert (pool.num_free, pool.num_published) == (NUM_BLOCKS, 2)
    assert pool.share([b"a"]).tolist() == blocks.tolist()[:1]


def test_what_follows_a_key_that_is_not_there_is_not_shared() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    published(pool, b"a", b"c")
    assert len(pool.share([b"a", b"b", b"c"])) == 1
    assert len(pool.share([b"b", b"c"])) == 0


def test_kept_blocks_are_handed_out_when_no_other_is_left_and_then_not_found_any_more() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    pool.free(published(pool, b"a", b"b"))
    assert pool.allocate(2).tolist() == [2, 3]
    assert pool.num_published == 2
    assert pool.allocate(2).tolist() == [1, 0]
    assert (pool.num_published, len(pool.share([b"a"]))) == (0, 0)


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    old, young = published(pool, b"a", b"b"), published(pool, b"c", b"d")
    pool.free(old)
    pool.free(young)
    pool.free(pool.share([b"a", b"b"]))  # used again
    assert pool.allocate(3).tolist() == [*young[::-1].tolist(), old[1]]
    assert pool.share([b"a", b"b"]).tolist() == [old[0]]


def test_a_second_block_of_the_same_key_is_not_kept() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    first, second = published(pool, b"a"), published(pool, b"a")
    pool.free(first)
    pool.free(second)
    assert pool.share([b"a"]).tolist() == first.tolist()
    assert pool.allocate(1).tolist() == second.tolist()


def lose_the_key_of_a_block(pool: BlockPool) -> None:
    pool._by_key.clear()


def keep_a_block_that_is_out(pool: BlockPool) -> None:
    pool._kept[published(pool, b"b").tolist()[0]] = None


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lose_the_key_of_a_block,
        keep_a_block_that_is_out,
    ],
    ids=["free twice", "lost", "key lost", "kept and out"],
)
def test_the_check_finds_a_damaged_pool(damage: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.free(published(pool, b"a"))
    pool.check()
    damage(pool)
    with pytest.raises(InternalError, match="damaged"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Owners take, extend, publish, share and give back blocks in any order.

    The model: who has which blocks, and what the last one who had a block to itself has written into it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.tables: list[Int32] = []
        self.written: dict[int, bytes] = {}

    def note_taken(self, blocks: Int32) -> None:
        owned = {block for table in self.tables for block in table.tolist()}
        assert owned.isdisjoint(blocks.tolist()), "a block that others read was handed out to be written"
        for block in blocks.tolist():
            self.written.pop(block, None)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(InternalError):
                self.pool.allocate(count)
        else:
            blocks = self.pool.allocate(count)
            self.note_taken(blocks)
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables[index]
        room = (len(table) + self.pool.num_free) * BLOCK_SIZE
        longer = self.pool.append(table, data.draw(st.integers(0, room)))
        assert longer[: len(table)].tolist() == table.tolist()
        self.note_taken(longer[len(table) :])
        self.tables[index] = longer

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), first=st.integers(0, 2))
    def publish(self, data: st.DataObject, first: int) -> None:
        table = data.draw(st.sampled_from(self.tables)).tolist()
        for block, key in zip(table, KEYS[first:], strict=False):
            if self.written.setdefault(block, key) == key:  # else it holds something else already
                self.pool.publish(block, key)

    @rule(first=st.integers(0, 2), count=st.integers(0, 4))
    def share(self, first: int, count: int) -> None:
        keys = KEYS[first : first + count]
        blocks = self.pool.share(keys)
        assert [self.written[block] for block in blocks.tolist()] == keys[: len(blocks)]
        self.tables.append(blocks)

    @invariant()
    def every_block_has_as_many_owners_as_tables_hold_it(self) -> None:
        owners = Counter(block for table in self.tables for block in table.tolist())
        assert all(self.pool.num_owners(block) == owners[block] for block in range(NUM_BLOCKS))
        assert self.pool.num_free == NUM_BLOCKS - len(owners)
        self.pool.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
