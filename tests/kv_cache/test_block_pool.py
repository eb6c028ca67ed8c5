from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nano_inference.kv_cache.block_pool import Block, BlockPool

PICK = st.integers(0, 2**16)


class PoolMachine(RuleBasedStateMachine):
    """The linked list against a plain one."""

    @initialize(num_blocks=st.integers(1, 8))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = list(range(num_blocks))
        self.counts = [0] * num_blocks

    def block(self, pick: int) -> Block:
        return self.pool.blocks[pick % len(self.pool.blocks)]

    @rule()
    def take(self) -> None:
        if not self.free:
            with pytest.raises(RuntimeError, match="no free KV block"):
                self.pool.take()
            return
        taken = self.pool.take()
        assert taken.block_id == self.free.pop(0)
        self.counts[taken.block_id] = 1
        taken.forget()

    @rule(pick=PICK)
    def hold(self, pick: int) -> None:
        block = self.block(pick)
        self.pool.hold(block)
        if block.block_id in self.free:
            self.free.remove(block.block_id)
        self.counts[block.block_id] += 1

    @rule(pick=PICK, matchable=st.booleans())
    def release(self, pick: int, matchable: bool) -> None:
        block = self.block(pick)
        if not self.counts[block.block_id]:
            with pytest.raises(RuntimeError, match="released more often"):
                self.pool.release(block)
            return
        block.hash = 5 if matchable else -1
        self.pool.release(block)
        self.counts[block.block_id] -= 1
        if not self.counts[block.block_id]:
            self.free.insert(len(self.free) if matchable else 0, block.block_id)

    @precondition(lambda self: self.free)
    @rule(pick=PICK)
    def reuse_first(self, pick: int) -> None:
        block_id = self.free.pop(pick % len(self.free))
        self.pool.reuse_first(self.pool.blocks[block_id])
        self.free.insert(0, block_id)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.free_ids() == self.free
        assert self.pool.num_free == len(self.free)
        assert [block.ref_count for block in self.pool.blocks] == self.counts


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


class CountingList(list[int]):
    touched = 0

    def __getitem__(self, index: Any) -> Any:
        self.touched += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.touched += 1
        super().__setitem__(index, value)


def touches(num_blocks: int) -> int:
    """Elements of the links that are touched while a block leaves the middle, comes back, and moves to the head."""
    pool = BlockPool(num_blocks)
    pool._next, pool._previous = CountingList(pool._next), CountingList(pool._previous)
    block = pool.blocks[num_blocks // 2]
    pool.hold(block)
    pool.release(block)
    pool.reuse_first(block)
    pool.take()
    return pool._next.touched + pool._previous.touched


def test_leaving_the_list_costs_the_same_however_long_it_is() -> None:
    assert touches(8) == touches(5000)


def test_check_sees_a_torn_list() -> None:
    pool = BlockPool(4)
    pool.check()
    pool._previous[2] = 0
    with pytest.raises(AssertionError, match="torn"):
        pool.check()


def test_forgetting_drops_everything_that_names_a_block() -> None:
    block = Block(3, ref_count=1, hash=9, parent=8, token_ids=(1, 2))
    block.forget()
    assert block == Block(3, ref_count=1)
