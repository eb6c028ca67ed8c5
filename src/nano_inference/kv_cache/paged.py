"""A KV cache whose prefixes are found by a chain of block hashes (the design of vLLM's prefix cache)."""

from collections import Counter
from collections.abc import Iterable, Sequence

from nano_inference.kv_cache.block_hash import NO_PREFIX, Namespace, PrefixKeys
from nano_inference.kv_cache.block_pool import Block, BlockPool
from nano_inference.kv_cache.manager import CacheAllocation


class PagedKVCache:
    """Block tables over one pool, with a hash table over full blocks. Implements `KVCacheManager`.

    A block is matchable from the launch of the step that fills it until it is reused; freed blocks are reused from
    the longest unused on. Only full blocks have a name, and a named block is never written again, so sharing needs no
    lock; a partial block shared by a fork is copied on the first write.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV cache needs positive sizes, not {num_blocks} blocks of {block_size} tokens.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hash_to_block: dict[int, int] = {}
        self._pool = BlockPool(num_blocks)

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
        """The longest cached prefix of at most `limit` tokens. The token ids of every hit are compared."""
        block_ids: list[int] = []
        for index in range(min(len(prefix.hashes), limit // self.block_size)):
            block_id = self.hash_to_block.get(prefix.hashes[index])
            if block_id is None or not self._holds(self.blocks[block_id], token_ids, prefix, index):
                break
            block_ids.append(block_id)
        return CacheAllocation(tuple(block_ids), len(block_ids) * self.block_size)

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
        for index in blocks:
            block, name = self.blocks[table[index]], prefix.hashes[index]
            if block.hash == NO_PREFIX and name not in self.hash_to_block:
                start = index * self.block_size
                block.hash, block.parent, block.namespace = name, prefix.parent(index), prefix.namespace
                block.token_ids = tuple(token_ids[start : start + self.block_size])
                self.hash_to_block[name] = block.block_id

    def deallocate(self, block_ids: Sequence[int]) -> None:
        """Let go of a block table, its tail first: heads of prefixes are reused last."""
        for block_id in reversed(block_ids):
            self._pool.release(self.blocks[block_id])

    def drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version; their free blocks are reused first."""
        for block_id in list(self.hash_to_block.values()):
            block = self.blocks[block_id]
            space = block.namespace
            if space is not None and (space.weight_set, space.version) == (weight_set, version):
                self._forget(block)
                if block.ref_count == 0:
                    self._pool.reuse_first(block)

    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay in use."""
        for block_id in list(self.hash_to_block.values()):
            self._forget(self.blocks[block_id])

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant of pool, index and tables. For tests and debugging; O(blocks)."""
        self._pool.check()
        held = Counter(block_id for table in tables for block_id in table)
        for block in self.blocks:
            assert block.ref_count == held[block.block_id], f"block {block.block_id}: count and tables disagree"
            named = block.hash != NO_PREFIX
            assert not named or self.hash_to_block.get(block.hash) == block.block_id, "a name without an index entry"
            assert not named or len(block.token_ids) == self.block_size, "a named block that is not full"
            assert named or not block.token_ids, "token ids without a name"
        for name, block_id in self.hash_to_block.items():
            assert self.blocks[block_id].hash == name, "an index entry without a name"

    def _holds(self, block: Block, token_ids: Sequence[int], prefix: PrefixKeys, index: int) -> bool:
        start = index * self.block_size
        return (
            block.token_ids == tuple(token_ids[start : start + self.block_size])
            and block.parent == prefix.parent(index)
            and block.namespace == prefix.namespace
        )

    def _take(self) -> int:
        block = self._pool.take()
        if block.hash != NO_PREFIX:
            self._forget(block)
        return block.block_id

    def _forget(self, block: Block) -> None:
        del self.hash_to_block[block.hash]
        block.forget()
