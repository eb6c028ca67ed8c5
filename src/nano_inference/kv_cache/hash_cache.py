"""A KV cache that finds prefixes by a chain of block hashes.

This is the design of vLLM's prefix cache.
"""

from collections.abc import Iterable, Sequence

from nano_inference.kv_cache.block_hash import NO_PREFIX, PrefixKeys
from nano_inference.kv_cache.block_pool import Block
from nano_inference.kv_cache.manager import KVCacheManager


class PagedKVCache(KVCacheManager):
    """A KV cache with a hash table over full blocks, keyed by the hash of the whole prefix.

    Blocks without a name are reused first, then the least recently used ones.
    """

    @property
    def hash_to_block(self) -> dict[int, int]:
        """Map from the hash of every matchable block to its id."""
        return self._pool.names

    def _found(self, token_ids: Sequence[int], prefix: PrefixKeys, num_blocks: int) -> list[int]:
        """Return the blocks that hold the head of a sequence, with token ids compared."""
        block_ids: list[int] = []
        for index in range(min(len(prefix.hashes), num_blocks)):
            block_id = self._pool.names.get(prefix.hashes[index])
            if block_id is None or not self._holds(
                self._pool.blocks[block_id], token_ids, prefix, index
            ):
                break
            block_ids.append(block_id)
        return block_ids

    def publish(
        self, table: Sequence[int], token_ids: Sequence[int], prefix: PrefixKeys, blocks: range
    ) -> None:
        """Name these full blocks.

        If another block already has the name, that block keeps it, unless it is stripped and the
        new block is not.
        """
        for index in blocks:
            block, name = self._pool.blocks[table[index]], prefix.hashes[index]
            other = self._pool.names.get(name)
            old = self._pool.blocks[other] if other is not None else None
            if old is not None and (block.stripped or not old.stripped):
                continue
            if block.hash == NO_PREFIX:
                start = index * self.block_size
                block.parent = prefix.parent(index)
                block.token_ids = tuple(token_ids[start : start + self.block_size])
                self._pool.give_name(block, name, prefix.namespace)
                if old is not None:  # last: a kept name must always have a block
                    self._forget(old)

    def _contents(self, block_ids: Sequence[int]) -> list[int]:
        """Return the token ids of named blocks."""
        return [
            token_id for block_id in block_ids for token_id in self._pool.blocks[block_id].token_ids
        ]

    def _name_before(self, block: Block) -> int:
        return block.parent

    def _forget(self, block: Block) -> None:
        self._pool.forget(block)

    def _drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version. Their free blocks are reused first."""
        for block in self._named():
            space = block.namespace
            if space is not None and (space.weight_set, space.version) == (weight_set, version):
                self._forget(block)

    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay in use."""
        for block in self._named():
            self._forget(block)

    def _check_names(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that names and index agree."""
        for block in self._pool.blocks:
            named = block.hash != NO_PREFIX
            assert not named or self._pool.names.get(block.hash) == block.block_id, (
                "a name has no index entry"
            )
            assert not named or len(block.token_ids) == self.block_size, "a named block is not full"
        for name, block_id in self._pool.names.items():
            assert self._pool.blocks[block_id].hash == name, "an index entry has no named block"

    def _named(self) -> Iterable[Block]:
        return [self._pool.blocks[block_id] for block_id in self._pool.names.values()]

    def _holds(
        self, block: Block, token_ids: Sequence[int], prefix: PrefixKeys, index: int
    ) -> bool:
        start = index * self.block_size
        return (
            block.token_ids == tuple(token_ids[start : start + self.block_size])
            and block.parent == prefix.parent(index)
            and block.namespace == prefix.namespace
        )
