"""Block ids, reference counts, and the free list: doubly linked, so that any block leaves it in O(1)."""

import itertools
from dataclasses import dataclass

from nano_inference.kv_cache.block_hash import NO_PREFIX, Namespace

_NONE = -1  # end of the linked list


@dataclass(slots=True)
class Block:
    """One KV block. `hash` names its contents while it is matchable, else it is -1."""

    block_id: int
    ref_count: int = 0
    hash: int = NO_PREFIX
    parent: int = NO_PREFIX
    token_ids: tuple[int, ...] = ()
    namespace: Namespace | None = None

    def forget(self) -> None:
        """Drop the name: the block is no longer matchable."""
        self.hash, self.parent, self.token_ids, self.namespace = NO_PREFIX, NO_PREFIX, (), None


class BlockPool:
    """All blocks of a cache. Free blocks stand in a list from first-to-be-reused to last."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_free = num_blocks
        # Element `num_blocks` is a sentinel: its next is the head of the list, its previous the tail.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    def take(self) -> Block:
        """Remove and return the head of the free list, held once. Its old name is left for the caller to forget."""
        if not self.num_free:
            raise RuntimeError("no free KV block: the plan promised more than the cache has.")
        block = self.blocks[self._next[len(self.blocks)]]
        self.hold(block)
        return block

    def hold(self, block: Block) -> None:
        """Count one more holder; a free block leaves the free list."""
        if block.ref_count == 0:
            self._unlink(block.block_id)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Count one holder less; a block that nobody holds becomes free: last to be reused if it is matchable."""
        if block.ref_count <= 0:
            raise RuntimeError(f"block {block.block_id} was released more often than it was held.")
        block.ref_count -= 1
        if block.ref_count == 0:
            sentinel = len(self.blocks)
            matchable = block.hash != NO_PREFIX
            self._link(block.block_id, after=self._previous[sentinel] if matchable else sentinel)

    def reuse_first(self, block: Block) -> None:
        """Move a free block to the head of the free list."""
        self._unlink(block.block_id)
        self._link(block.block_id, after=len(self.blocks))

    def free_ids(self) -> list[int]:
        """Free block ids from first to be reused to last."""
        ids: list[int] = []
        at = self._next[len(self.blocks)]
        while at != len(self.blocks):
            ids.append(at)
            at = self._next[at]
        return ids

    def check(self) -> None:
        """Assert that the list is one ring of exactly the blocks that nobody holds."""
        ids = self.free_ids()
        assert len(ids) == self.num_free == len(set(ids)), "free list and its length disagree"
        assert set(ids) == {b.block_id for b in self.blocks if b.ref_count == 0}, "free list and counts disagree"
        ring = [len(self.blocks), *ids, len(self.blocks)]
        for left, right in itertools.pairwise(ring):
            assert self._next[left] == right, "free list is torn"
            assert self._previous[right] == left, "free list is torn backwards"

    def _unlink(self, at: int) -> None:
        left, right = self._previous[at], self._next[at]
        self._next[left], self._previous[right] = right, left
        self._next[at] = self._previous[at] = _NONE
        self.num_free -= 1

    def _link(self, at: int, after: int) -> None:
        right = self._next[after]
        self._next[after] = self._previous[right] = at
        self._previous[at], self._next[at] = after, right
        self.num_free += 1
