"""Block tables over one pool: what all caches have in common. How prefixes are found is the index's business."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from nano_inference.kv_cache.block_hash import NO_PREFIX, Namespace, PrefixKeys
from nano_inference.kv_cache.block_pool import Block, BlockPool
from nano_inference.kv_cache.manager import CacheAllocation


class PrefixIndex(Protocol):
    """Which blocks hold which prefixes. A block is named (its `hash` is set) exactly while the index knows it."""

    def match(self, token_ids: Sequence[int], prefix: PrefixKeys, num_blocks: int) -> Sequence[int]:
        """Blocks that hold the head of a sequence, at most `num_blocks`. Writes nothing."""
        ...

    def publish(self, table: Sequence[int], token_ids: Sequence[int], prefix: PrefixKeys, blocks: range) -> None:
        """Name these full blocks, unless their contents have a block already."""
        ...

    def forget(self, block: Block) -> None:
        """Drop a named block that is about to be reused."""
        ...

    def drop_version(self, weight_set: str, version: int) -> None:
        """Drop every block of a weight version."""
        ...

    def flush(self) -> None:
        """Drop every block."""
        ...

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert every invariant of the index."""
        ...


class IndexedKVCache:
    """Block tables over one pool and one index of prefixes. Implements `KVCacheManager`.

    A block is matchable from the launch of the step that fills it until it is reused. Only full blocks have a name,
    and a named block is never written again, so sharing needs no lock; a partial block shared by a fork is copied on
    the first write.
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex, block_size: int) -> None:
        self.num_blocks = len(pool.blocks)
        self.block_size = block_size
        self._pool = pool
        self._index = index

    @property
    def blocks(self) -> list[Block]:
        """All blocks, by id."""
        return self._pool.blocks

    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, matchable ones included."""
        return self._pool.num_free

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold this block."""
        return self.blocks[block_id].ref_count

    def match(self, token_ids: Sequence[int], prefix: PrefixKeys, limit: int) -> CacheAllocation:
        """The longest cached prefix of at most `limit` tokens, in whole blocks. Token ids are compared; no writes."""
        block_ids = tuple(self._index.match(token_ids, prefix, min(limit, len(token_ids)) // self.block_size))
        return CacheAllocation(block_ids, len(block_ids) * self.block_size)

    def allocate(self, token_ids: Sequence[int], *, prefix: PrefixKeys | None = None) -> CacheAllocation:
        """Blocks for all of `token_ids`: cached ones first, fresh ones after them. The last token is never cached.

        Raises `RuntimeError`, with nothing taken, where too few blocks are free.
        """
        if prefix is None:
            prefix = PrefixKeys(Namespace())
            prefix.extend(token_ids, self.block_size)
        found = self.match(token_ids, prefix, len(token_ids) - 1)
        table = list(found.block_ids)
        self.adopt(table)
        fresh = -(-len(token_ids) // self.block_size) - len(table)
        if fresh > self._pool.num_free:
            self.deallocate(table)
            raise RuntimeError(f"{fresh} KV blocks are needed and {self._pool.num_free} are free.")
        self.extend(table, found.cached_length, len(token_ids))
        return CacheAllocation(tuple(table), found.cached_length)

    def adopt(self, block_ids: Sequence[int]) -> None:
        """Hold these blocks once more."""
        for block_id in block_ids:
            self._pool.hold(self.blocks[block_id])

    def extend(self, table: list[int], start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Make positions [start, end) writable: own the block that `start` stands in, append fresh ones up to `end`.

        Returns the copies (source block, target block) that must run before anything is written.
        """
        copies: tuple[tuple[int, int], ...] = ()
        index = start // self.block_size
        if index < len(table) and self.blocks[table[index]].ref_count > 1:
            target = self._take()
            copies = ((table[index], target),)
            self._pool.release(self.blocks[table[index]])
            table[index] = target
        while len(table) * self.block_size < end:
            table.append(self._take())
        return copies

    def publish(self, table: Sequence[int], token_ids: Sequence[int], prefix: PrefixKeys, blocks: range) -> None:
        """Make these full blocks matchable. Where the contents are already matchable elsewhere, that stays."""
        self._index.publish(table, token_ids, prefix, blocks)

    def deallocate(self, block_ids: Sequence[int]) -> None:
        """Let go of a block table, its tail first: heads of prefixes are reused last."""
        for block_id in reversed(block_ids):
            self._pool.release(self.blocks[block_id])

    def drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version; their free blocks are reused first."""
        self._index.drop_version(weight_set, version)

    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay in use."""
        self._index.flush()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant of pool, index and tables. For tests and debugging; O(blocks)."""
        tables = list(tables)
        self._pool.check()
        held = Counter(block_id for table in tables for block_id in table)
        for block in self.blocks:
            assert block.ref_count == held[block.block_id], f"block {block.block_id}: count and tables disagree"
            nameless = block == Block(block.block_id, block.ref_count) and block.above is None
            assert nameless or block.hash != NO_PREFIX, "a block without a name has contents, or a place in a path"
        self._index.check(tables)

    def _take(self) -> int:
        block = self._pool.first_free()
        if block.hash != NO_PREFIX:
            self._index.forget(block)
        self._pool.hold(block)
        return block.block_id


def new_pool(num_blocks: int, block_size: int) -> BlockPool:
    """The pool of a cache of this size; raises `ValueError` where there is nothing to pool."""
    if num_blocks < 1 or block_size < 1:
        raise ValueError(f"a KV cache needs positive sizes, not {num_blocks} blocks of {block_size} tokens.")
    return BlockPool(num_blocks)
