"""The block pool gives no block to two owners and loses none."""

from __future__ import annotations

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


def test_the_check_finds_a_block_that_is_free_twice() -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool._free.append(0)
    with pytest.raises(InternalError, match="damaged"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Owners take, extend and give back blocks in any order; the model is a dictionary of who has what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.tables: list[Int32] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(InternalError):
                self.pool.allocate(count)
        else:
            self.tables.append(self.pool.allocate(count))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables[index]
        room = (len(table) + self.pool.num_free) * BLOCK_SIZE
        longer = self.pool.append(table, data.draw(st.integers(0, room)))
        assert longer[: len(table)].tolist() == table.tolist()
        self.tables[index] = longer

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def every_block_has_at_most_one_owner(self) -> None:
        out = [block for table in self.tables for block in table.tolist()]
        assert len(out) == len(set(out))
        assert set(out) <= set(range(NUM_BLOCKS))
        assert self.pool.num_free == NUM_BLOCKS - len(out)
        self.pool.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
