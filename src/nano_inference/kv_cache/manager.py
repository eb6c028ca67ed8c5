"""The protocol between the loop and a KV cache. `schedule` sees only the read-only half,
`CacheView`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nano_inference.kv_cache.block_hash import PrefixKeys
from nano_inference.kv_cache.units import BlockLayout


@dataclass(frozen=True, slots=True)
class CacheAllocation:
    """Blocks at the head of a sequence, and how many leading tokens of it they already hold."""

    block_ids: tuple[int, ...]
    cached_length: int


class CacheView(Protocol):
    """What a scheduling decision may ask. Nothing here writes."""

    block_size: int
    layout: BlockLayout

    def num_free_blocks(self) -> int:
        """Blocks that no table holds; those that still hold a matchable prefix count as free."""
        ...

    def num_free_units(self) -> int:
        """Units that can be taken now: all but those that a table needs. A fresh block takes
        `layout.num_units`.
        """
        ...

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold this block."""
        ...

    def num_users(self, block_id: int) -> int:
        """How many block tables have this block in their window. Only for a layout with sliding
        units.
        """
        ...

    def match(self, token_ids: Sequence[int], prefix: PrefixKeys, limit: int) -> CacheAllocation:
        """The longest cached prefix of at most `limit` tokens, in whole blocks."""
        ...


class KVCacheManager(CacheView, Protocol):
    """The verbs that change a cache. A block table is a list of block ids owned by one sequence.

    The first `num_slid` blocks of a table have left its window: `layout.num_slid(tokens computed)`
    at all times.
    """

    num_blocks: int
    num_units: int

    def share_in_use(self) -> float:
        """Share of the memory that sequences hold; the rest may hold prefixes."""
        ...

    def allocate(
        self, token_ids: Sequence[int], *, prefix: PrefixKeys | None = None
    ) -> CacheAllocation:
        """Blocks for all of `token_ids`: cached ones first, fresh ones after them."""
        ...

    def adopt(self, block_ids: Sequence[int], num_slid: int = 0) -> None:
        """Hold these blocks once more: a match that is now used, or a fork."""
        ...

    def extend(self, table: list[int], start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Make positions [start, end) of a sequence writable; returns the (source, target) block
        copies to run.
        """
        ...

    def slide(self, table: Sequence[int], start: int, end: int) -> None:
        """The sequence goes on at `end` instead of `start`: let go of the blocks that left its
        window.
        """
        ...

    def publish(
        self, table: Sequence[int], token_ids: Sequence[int], prefix: PrefixKeys, blocks: range
    ) -> None:
        """Make these full blocks of a sequence matchable."""
        ...

    def deallocate(self, block_ids: Sequence[int], num_slid: int = 0) -> None:
        """Let go of a block table. Blocks that nobody holds become free, and stay matchable until
        they are reused.
        """
        ...

    def drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version; their free blocks are reused first."""
        ...

    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay in use."""
        ...

    def check(self, tables: Iterable[Sequence[int]], num_slid: Iterable[int] | None = None) -> None:
        """Assert every invariant, given all live block tables, and how many blocks have left the
        window of each.
        """
        ...
