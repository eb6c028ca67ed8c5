from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nano_inference.kv_cache.block_pool import Block, BlockPool
from tests.depth import at_depth

PICK = st.integers(0, 2**16)


class PoolMachine(RuleBasedStateMachine):
    """Compare the ring with three plain lists: unnamed free blocks, named free blocks, and pinned
    blocks.
    """

    @initialize(num_blocks=st.integers(1, 8))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.nameless, self.named, self.pinned = list(range(num_blocks)), list[int](), list[int]()
        self.counts = [0] * num_blocks

    def block(self, pick: int) -> Block:
        return self.pool.blocks[pick % len(self.pool.blocks)]

    def below(self, block: Block) -> list[Block]:
        return [each for each in self.pool.blocks if each.above is block]

    def is_pinned(self, block: Block) -> bool:
        return any(self.counts[each.block_id] or self.is_pinned(each) for each in self.below(block))

    def place(self, block: Block | None) -> None:
        """Insert a free block as the most recently used of its kind, together with blocks above it
        that changed.
        """
        while block is not None and not self.counts[block.block_id]:
            lists = [self.nameless, self.named, self.pinned]
            was = next((kind for kind, ids in enumerate(lists) if block.block_id in ids), None)
            kind = 0 if block.hash == -1 else 2 if self.is_pinned(block) else 1
            if was == kind:
                return
            self.leave(block)
            lists[kind].insert(0 if kind == 0 else len(lists[kind]), block.block_id)
            block = block.above

    def leave(self, block: Block) -> None:
        for ids in (self.nameless, self.named, self.pinned):
            if block.block_id in ids:
                ids.remove(block.block_id)

    @rule()
    def take(self) -> None:
        free = [*self.nameless, *self.named, *self.pinned]
        if not free:
            with pytest.raises(RuntimeError, match="no KV block is free"):
                self.pool.first_free()
            return
        block = self.pool.first_free()
        assert block.block_id == free[0]
        if not self.below(block):
            self.forget(block.block_id)
            self.hold(block.block_id)

    @rule(pick=PICK)
    def hold(self, pick: int) -> None:
        block = self.block(pick)
        self.pool.hold(block)
        self.counts[block.block_id] += 1
        self.leave(block)
        self.place(block.above)

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        block = self.block(pick)
        if not self.counts[block.block_id]:
            with pytest.raises(RuntimeError, match="released too often"):
                self.pool.release(block)
            return
        self.pool.release(block)
        self.counts[block.block_id] -= 1
        self.place(block)

    @rule(pick=PICK, under=PICK)
    def name(self, pick: int, under: int) -> None:
        block, above = self.block(pick), self.block(under)
        if not self.counts[block.block_id] or block.hash != -1:
            return
        block.hash = 5
        self.pool.put_below(block, above if above.hash != -1 and above is not block else None)
        self.place(block.above)

    @rule(pick=PICK)
    def forget(self, pick: int) -> None:
        block = self.block(pick)
        if self.below(block):
            return
        above = block.above
        self.pool.forget(block)
        assert block == Block(block.block_id, block.ref_count)
        if not self.counts[block.block_id]:
            self.leave(block)
        self.place(block)
        self.place(above)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.free_ids() == [*self.nameless, *self.named, *self.pinned]
        assert self.pool.num_free == len(self.pool.free_ids())
        assert [block.ref_count for block in self.pool.blocks] == self.counts


PoolMachine.TestCase.settings = settings(
    max_examples=at_depth(60), stateful_step_count=40, deadline=None
)
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
    """Count the link elements touched when a block leaves the middle, returns, and is reused."""
    pool = BlockPool(num_blocks)
    pool._next, pool._previous = CountingList(pool._next), CountingList(pool._previous)
    block = pool.blocks[num_blocks // 2]
    pool.hold(block)
    block.hash = 5
    pool.release(block)
    pool.forget(block)
    pool.hold(pool.first_free())
    return pool._next.touched + pool._previous.touched


def test_free_list_removal_takes_constant_time() -> None:
    assert touches(8) == touches(5000)


def test_check_detects_a_broken_list() -> None:
    pool = BlockPool(4)
    pool.check()
    pool._previous[2] = 0
    with pytest.raises(AssertionError, match="broken"):
        pool.check()


def test_held_path_pins_each_block_once() -> None:
    pool = BlockPool(4)
    path = pool.blocks[:3]
    for block in path:
        pool.hold(block)
    for above, block in zip([None, *path], path, strict=False):
        block.hash = 5
        pool.put_below(block, above)
    for block in path:  # a fork
        pool.hold(block)
    assert [block.pins for block in path] == [1, 1, 0]
    for block in reversed(path * 2):
        pool.release(block)
    assert [block.pins for block in path] == [0, 0, 0]
    assert pool.free_ids() == [3, 2, 1, 0]
    pool.check()


def test_forget_drops_every_name_of_a_block() -> None:
    block = Block(3, ref_count=1, hash=9, parent=8, token_ids=(1, 2), above=Block(4))
    block.forget()
    assert block.above is None
    assert block == Block(3, ref_count=1)
