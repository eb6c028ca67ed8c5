"""A KV cache whose prefixes are found by a chain of block hashes (the design of vLLM's prefix
cache).
"""

from collections.abc import Iterable, Sequence

from nano_inference.kv_cache.block_hash import NO_PREFIX, PrefixKeys
from nano_inference.kv_cache.block_pool import Block
from nano_inference.kv_cache.manager import KVCacheManager


class PagedKVCache(KVCacheManager):
    """A KV cache with a hash table over full blocks: by the hash of everything up to their end.

    Blocks without a name are reused first, then the longest unused.
    """

    @property
    def hash_to_block(self) -> dict[int, int]:
        """Of every full block that can be matched: its hash, and its id."""
        return self._pool.names

    def _found(self, token_ids: Sequence[int], prefix: PrefixKeys, num_blocks: int) -> list[int]:
        """Blocks that hold the head of a sequence. The token ids of every hit are compared."""
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
        """Name these full blocks. Where the contents are already matchable elsewhere, that stays,
        unless stripped.
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
                if old is not None:  # only now: a name that is kept is never gone between
                    self._forget(old)

    def _contents(self, block_ids: Sequence[int]) -> list[int]:
        """Token ids of named blocks."""
        return [
            token_id for block_id in block_ids for token_id in self._pool.blocks[block_id].token_ids
        ]

    def _forget(self, block: Block) -> None:
        """Drop a block."""
        self._pool.forget(block)

    def _drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version; their free blocks are reused first."""
        for block in self._named():
            space = block.namespace
            if space is not None and (space.weight_set, space.version) == (weight_set, version):
                self._forget(block)

    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay in use."""
        for block in self._named():
            self._forget(block)

    def _check_names(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that names and index agree, whatever the tables are."""
        for block in self._pool.blocks:
            named = block.hash != NO_PREFIX
            assert not named or self._pool.names.get(block.hash) == block.block_id, (
                "a name without an index entry"
            )
            assert not named or len(block.token_ids) == self.block_size, (
                "a named block that is not full"
            )
        for name, block_id in self._pool.names.items():
            assert self._pool.blocks[block_id].hash == name, "an index entry without a name"

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
