"""Copies of KV blocks into the cache of a running engine."""

from collections.abc import Sequence

from nano_inference.arrays import Tensor
from nano_inference.device.runner import ModelRunner
from nano_inference.kv_cache.block_hash import PrefixKeys
from nano_inference.kv_cache.manager import KVCacheManager

MOST_BYTES = 16 << 20  # copied at a time: a step waits for each copy


def put_blocks(
    cache: KVCacheManager,
    runner: ModelRunner,
    token_ids: Sequence[int],
    prefix: PrefixKeys,
    first: int,
    parts: Sequence[Tensor],
) -> tuple[list[int], int]:
    """Insert the blocks of a chain from index `first` on into a cache, up to the free capacity.

    No step may be in flight. `parts` has a tensor for each rank, uint8 [blocks, bytes].

    Return a block table of the inserted blocks and their prefix, and how many of its blocks were
    already cached. The caller deallocates the table.
    """
    table, cached = cache.reserve(token_ids, prefix, first, first + len(parts[0]))
    if len(table) > cached:
        fresh = slice(cached - first, len(table) - first)
        runner.write_blocks(table[cached:], [part[fresh] for part in parts])
        cache.publish(table, token_ids, prefix, range(cached, len(table)))
    return table, cached
