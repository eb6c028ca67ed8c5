"""Copies of KV blocks into a running engine."""

from collections.abc import Sequence

from torch import Tensor

from nano_inference.device.runner import ModelRunner
from nano_inference.kv_cache.block_hash import PrefixKeys
from nano_inference.kv_cache.manager import KVCacheManager

MOST_BYTES = 16 << 20  # of one piece: a step waits while it is copied


def put_blocks(
    cache: KVCacheManager,
    runner: ModelRunner,
    token_ids: Sequence[int],
    prefix: PrefixKeys,
    first: int,
    parts: Sequence[Tensor],
) -> tuple[list[int], int]:
    """Put blocks of a chain from place `first` on into a cache, as far as there is room, with
    nothing in flight. `parts`, by rank: each uint8 [blocks, bytes].

    Returns a table that holds them and those before them, for the caller to let go of, and how
    many of these were there.
    """
    table, cached = cache.reserve(token_ids, prefix, first, first + len(parts[0]))
    if len(table) > cached:
        fresh = slice(cached - first, len(table) - first)
        runner.write_blocks(table[cached:], [part[fresh] for part in parts])
        cache.publish(table, token_ids, prefix, range(cached, len(table)))
    return table, cached
