"""`KVCacheManager`: block tables over one block pool.

A hash table or a radix tree finds the blocks that sequences can share.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nano_inference.kv_cache.block_changes import BlockChanges
from nano_inference.kv_cache.block_hash import NO_PREFIX, Namespace, PrefixKeys
from nano_inference.kv_cache.block_pool import Block, BlockPool
from nano_inference.kv_cache.kept import Kept, Mark
from nano_inference.kv_cache.sliding_window import UNIFORM, BlockLayout, UnitPool


@dataclass(frozen=True, slots=True)
class CacheAllocation:
    """Blocks at the head of a sequence, and the number of leading tokens that they already hold."""

    block_ids: tuple[int, ...]
    cached_length: int


class CacheView(Protocol):
    """Read-only view of a KV cache for scheduling decisions."""

    block_size: int
    layout: BlockLayout

    def num_free_blocks(self) -> int:
        """Return the number of blocks that no table holds, including matchable ones."""
        ...

    def num_free_units(self) -> int:
        """Return the number of units that can be taken now.

        That is all units except those that a table needs. A fresh block takes `layout.num_units`.
        """
        ...

    def ref_count(self, block_id: int) -> int:
        """Return the number of block tables that hold this block."""
        ...

    def num_users(self, block_id: int) -> int:
        """Return the number of block tables that have this block in their window.

        Only for a layout with sliding units.
        """
        ...

    def match(self, token_ids: Sequence[int], prefix: PrefixKeys, limit: int) -> CacheAllocation:
        """Return the longest cached prefix of at most `limit` tokens, in whole blocks."""
        ...


class Found(NamedTuple):
    """Named blocks of a chain, with their namespace and token ids."""

    namespace: Namespace
    block_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class EvictedBlock(NamedTuple):
    """A kept block that is about to be reused or no longer kept, with its contents."""

    block_id: int
    name: int
    token_ids: tuple[int, ...]
    namespace: Namespace
    mark: Mark


class EvictedBlocks(Protocol):
    """Storage of kept blocks that are evicted.

    A Protocol, because `device.kept_files.KeptFiles` has tensors and is in a higher layer.
    """

    def take(self, block: EvictedBlock) -> None:
        """Save a block, which may be reused once the call returns."""
        ...

    def forget(self, is_dead: Callable[[Namespace], bool]) -> None:
        """Forget blocks of dead namespaces, which nothing will request again."""
        ...


class KVCacheManager(ABC):
    """Block tables over one block pool.

    A block table is a list of block ids owned by one sequence. Its first `layout.num_slid(tokens
    computed)` blocks have left the window.

    `PagedKVCache` and `RadixKVCache` implement the lookup of prefixes. A block has a name (its
    `hash` is set) exactly while the lookup can find it.

    A block is matchable from the launch of the step that fills it until it is reused. Only full
    blocks have names, and a named block is never written again, so sharing needs no lock. A partial
    block that a fork shares is copied on the first write.

    If layers have a window, `units` maps each block to its memory. Otherwise each block is its own
    memory.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        layout: BlockLayout = UNIFORM,
        num_units: int | None = None,
        evicted: Callable[[], EvictedBlocks | None] = lambda: None,
    ) -> None:
        """Build an empty cache.

        Raise `ValueError` for sizes that are not positive.

        Args:
            num_blocks: Number of block ids.
            block_size: Tokens per block.
            layout: Memory units of a block.
            num_units: Number of memory units. None for enough to have all blocks within the window.
            evicted: Function that returns the storage of evicted kept blocks, or None to discard
                them. It is called on each use, so the storage may be created later.
        """
        if num_units is None:
            num_units = num_blocks * layout.num_units
        if num_blocks < 1 or block_size < 1 or num_units < 1:
            raise ValueError(
                f"num_blocks={num_blocks}, block_size={block_size} and num_units={num_units} "
                "must all be positive."
            )
        self.num_blocks, self.block_size, self.layout = num_blocks, block_size, layout
        # without a window each block is one unit
        self.num_units = num_blocks if layout == UNIFORM else num_units
        self.units = None if layout == UNIFORM else UnitPool(num_units, num_blocks, layout)
        hooks = (self.units.give_back, self.units.spare_no_more) if self.units is not None else ()
        self._pool = BlockPool(num_blocks, *hooks)
        self._evicted = evicted

    @property
    def evicted(self) -> EvictedBlocks | None:
        """Storage of evicted kept blocks. None if they are discarded."""
        return self._evicted()

    @property
    def blocks(self) -> list[Block]:
        """All blocks, indexed by id."""
        return self._pool.blocks

    def num_free_blocks(self) -> int:
        """Return the number of blocks that no table holds, including matchable ones."""
        return self._pool.num_free

    def num_cached_blocks(self) -> int:
        """Return the number of blocks that no table holds but a prefix can match."""
        return self._pool.num_cached

    def num_shared_blocks(self) -> int:
        """Return the number of blocks that more than one table holds."""
        return self._pool.num_shared

    def num_free_units(self) -> int:
        """Return the number of units that no table needs, including those of matchable blocks."""
        if self.units is None:
            return self._pool.num_free
        held = self.num_blocks - self._pool.num_free
        needed = self.layout.num_full * held + self.layout.num_sliding * self.units.num_in_window
        return self.num_units - needed

    def share_in_use(self) -> float:
        """Return the share of memory that sequences hold. The rest may hold prefixes.

        If units are separate memory, this is the larger share of the two memories.
        """
        units = 1 - self.num_free_units() / self.num_units
        return (
            max(units, 1 - self._pool.num_free / self.num_blocks) if self.layout.beside else units
        )

    def ref_count(self, block_id: int) -> int:
        """Return the number of block tables that hold this block."""
        return self._pool.blocks[block_id].ref_count

    def num_users(self, block_id: int) -> int:
        """Return the number of block tables that have this block in their window."""
        return self.blocks[block_id].num_users

    def match(self, token_ids: Sequence[int], prefix: PrefixKeys, limit: int) -> CacheAllocation:
        """Return the longest cached prefix of at most `limit` tokens, in whole blocks.

        Compares token ids and changes nothing. Blocks within the window of the next token have all
        their units. Earlier blocks may be stripped.
        """
        matches = self._found(token_ids, prefix, min(limit, len(token_ids)) // self.block_size)
        block_ids = tuple(matches[: self._usable(matches)])
        return CacheAllocation(block_ids, len(block_ids) * self.block_size)

    def allocate(
        self, token_ids: Sequence[int], *, prefix: PrefixKeys | None = None
    ) -> CacheAllocation:
        """Return blocks for all of `token_ids`: cached ones first, then fresh ones.

        The last token is never cached. All blocks count as within the window.

        Raise `RuntimeError` if too few blocks are free. Nothing is taken in that case.
        """
        if prefix is None:
            prefix = PrefixKeys(Namespace())
            prefix.extend(token_ids, self.block_size)
        table = self._whole_match(token_ids, prefix, len(token_ids) - 1)
        self.adopt(table)
        cached_length = len(table) * self.block_size
        fresh, room = -(-len(token_ids) // self.block_size) - len(table), self._room()
        if fresh > room:
            self.deallocate(table)
            raise RuntimeError(f"{fresh} fresh KV blocks are needed, but only {room} are free.")
        self.extend(table, cached_length, len(token_ids))
        return CacheAllocation(tuple(table), cached_length)

    def adopt(self, block_ids: Sequence[int], num_slid: int = 0) -> None:
        """Add a table that holds these blocks.

        The first `num_slid` blocks are outside the table's window.
        """
        for block_id in block_ids:
            self._pool.hold(self.blocks[block_id])
        if self.units is not None:
            for block_id in block_ids[:num_slid]:
                self.units.offer(self.blocks[block_id])
            for block_id in block_ids[num_slid:]:
                self.units.enter(self.blocks[block_id])

    def extend(self, table: list[int], start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Make positions [start, end) of a table writable.

        A shared block at `start` is replaced by a copy, and fresh blocks are appended up to `end`.
        Return the copies (source block, target block) that must run before anything is written.
        """
        copies: tuple[tuple[int, int], ...] = ()
        index = start // self.block_size
        if index < len(table) and self.blocks[table[index]].ref_count > 1:
            target = self._take()
            copies = ((table[index], target),)
            self._release(self.blocks[table[index]], in_window=True)
            table[index] = target
        while len(table) * self.block_size < end:
            table.append(self._take())
        return copies

    def slide(self, table: Sequence[int], start: int, end: int) -> None:
        """Release the blocks that leave a sequence's window as it advances from `start` to `end`.

        Their sliding-window units stay matchable until they are taken.
        """
        if self.units is not None:
            num_slid = self.layout.num_slid
            for block_id in table[
                num_slid(start, self.block_size) : num_slid(end, self.block_size)
            ]:
                self.units.leave(self.blocks[block_id], still_held=True)

    @abstractmethod
    def publish(
        self, table: Sequence[int], token_ids: Sequence[int], prefix: PrefixKeys, blocks: range
    ) -> None:
        """Make these full blocks matchable.

        If another block with the same contents is matchable, that block stays so, unless it is
        stripped.
        """

    def deallocate(self, block_ids: Sequence[int], num_slid: int = 0) -> None:
        """Release a block table, its tail first, so that heads of prefixes are reused last."""
        if self.units is None:
            self._pool.release_all(reversed(block_ids))
            return
        for index in reversed(range(len(block_ids))):
            self._release(self.blocks[block_ids[index]], in_window=index >= num_slid)

    def drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version. Their free blocks are reused first."""
        self._drop_version(weight_set, version)
        if self.evicted is not None:
            self.evicted.forget(
                lambda space: (space.weight_set, space.version) == (weight_set, version)
            )

    @abstractmethod
    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay in use."""

    def keep(self, prefix: PrefixKeys, start: int, seconds: float, priority: int) -> None:
        """Keep the matchable blocks of a chain for `seconds` from now.

        Kept blocks are evicted last, those of lower `priority` first. Sliding-window units are kept
        for the blocks in the window of a row at or after position `start`, or for all blocks if
        evicted blocks can be restored.
        """
        start = start if self.evicted is None else 0
        names = list(itertools.takewhile(self._pool.names.__contains__, prefix.hashes))
        until = self._pool.kept.clock() + seconds
        self._pool.expire()
        self._keep(names, until, priority, self.layout.num_slid(start, self.block_size))

    def keep_again(self, names: list[int], mark: Mark) -> None:
        """Keep a restored chain whose last block had this mark before its eviction."""
        start = len(names) - 1 if mark.whole else len(names)
        self._keep(names, mark.until, mark.priority, start)

    def expire_kept(self) -> None:
        """Stop keeping blocks whose time is over. O(1) if there are none."""
        if self._pool.kept.marks:
            self._pool.expire()

    def let_go(self, prefix: PrefixKeys, start: int) -> int:
        """Stop keeping the blocks of a chain, its end first, down to the block of position `start`.

        Stops at a block that another kept chain continues. Return the number of blocks let go.
        """
        marks, blocks = self._pool.kept.marks, self._pool.blocks
        below = Counter(map(self._name_before, (blocks[self._pool.names[name]] for name in marks)))
        gone: list[int] = []
        first = -(-start // self.block_size)
        for index in reversed(range(first, len(prefix.hashes))):
            name = prefix.hashes[index]
            if name not in marks:
                continue
            if below[name]:
                break
            gone.append(name)
            below[self._name_before(blocks[self._pool.names[name]])] -= 1
        self._pool.let_go(gone)
        return len(gone)

    def let_go_adapter(self, adapter: str) -> None:
        """Stop keeping blocks of this version of an adapter, which nothing will request again."""
        blocks = self._pool.blocks
        self._pool.let_go(
            name
            for name in list(self._pool.kept.marks)
            if (space := blocks[self._pool.names[name]].namespace) is not None
            and space.adapter == adapter
        )
        if self.evicted is not None:
            self.evicted.forget(lambda space: space.adapter == adapter)

    @property
    def kept(self) -> Kept:
        """Names that requests asked to keep."""
        return self._pool.kept

    @abstractmethod
    def _drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version."""

    @abstractmethod
    def _found(
        self, token_ids: Sequence[int], prefix: PrefixKeys, num_blocks: int
    ) -> Sequence[int]:
        """Return at most `num_blocks` blocks that hold the head of a sequence. Changes nothing."""

    @abstractmethod
    def _contents(self, block_ids: Sequence[int]) -> list[int]:
        """Return the token ids of named blocks."""

    @abstractmethod
    def _name_before(self, block: Block) -> int:
        """Return the name of the block before a named block, or `NO_PREFIX`."""

    @abstractmethod
    def _forget(self, block: Block) -> None:
        """Forget a named block that is about to be reused."""

    @abstractmethod
    def _check_names(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that names and their index agree, given all tables."""

    # -- between engines ---------------------------------------------------------------------------

    def find(self, names: Sequence[int]) -> Found:
        """Return the cached blocks at the head of a chain of block names.

        The chain must begin at the head of a sequence. The result ends before the first block that
        is missing or lacks its sliding units. Changes nothing.
        """
        block_ids: list[int] = []
        for name in names:
            block_id = self._pool.names.get(name)
            if block_id is None or self.blocks[block_id].stripped:
                break
            block_ids.append(block_id)
        namespace = self.blocks[block_ids[0]].namespace if block_ids else None
        if namespace is None:
            return Found(Namespace(), (), ())
        prefix, token_ids = PrefixKeys(namespace), self._contents(block_ids)
        prefix.extend(token_ids, self.block_size)
        ours = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(prefix.hashes, names, strict=False)
        )
        count = sum(1 for _ in ours)
        return Found(
            namespace, tuple(block_ids[:count]), tuple(token_ids[: count * self.block_size])
        )

    def count(self, names: Sequence[int]) -> int:
        """Return how many blocks at the head of this chain are cached with all their units.

        Token ids are not compared.
        """
        blocks, ids = self.blocks, map(self._pool.names.get, names)
        return sum(
            1
            for _ in itertools.takewhile(lambda at: at is not None and not blocks[at].stripped, ids)
        )

    def reserve(
        self, token_ids: Sequence[int], prefix: PrefixKeys, start: int, end: int
    ) -> tuple[list[int], int]:
        """Return a table for blocks [0, end) of a sequence, and how many of them are cached.

        The caller writes the other blocks, publishes them and releases the table.

        The table is empty if block `start` would leave a gap after the cached blocks, and shorter
        than `end` if too few blocks are free.
        """
        table = self._whole_match(token_ids, prefix, end * self.block_size)
        cached = len(table)
        if cached < start:
            return [], 0
        self.adopt(table)
        end = min(end, cached + self._room())
        self.extend(table, cached * self.block_size, end * self.block_size)
        return table, cached

    def observe(self, changes: BlockChanges | None) -> list[int]:
        """Record published and dropped names in `changes` from now on (None: nowhere).

        Return the current names.
        """
        self._pool.changes = changes
        return list(self._pool.names)

    def check(self, tables: Iterable[Sequence[int]], num_slid: Iterable[int] | None = None) -> None:
        """Assert every invariant of pool, index, units and tables, in O(blocks).

        For tests and debugging.
        """
        tables = list(tables)
        self._pool.check()
        held = Counter(block_id for table in tables for block_id in table)
        for block in self.blocks:
            assert block.ref_count == held[block.block_id], (
                f"block {block.block_id}: reference count and tables disagree"
            )
            nameless = block == Block(block.block_id, block.ref_count) and block.above is None
            assert nameless or block.hash != NO_PREFIX, (
                "an unnamed block has contents or a block above it"
            )
        named = {block.hash: block.block_id for block in self.blocks if block.hash != NO_PREFIX}
        assert self._pool.names == named, "names and blocks disagree"
        self._check_names(tables)
        if self.units is not None:
            outside = [0] * len(tables) if num_slid is None else num_slid
            users = Counter(
                b for table, slid in zip(tables, outside, strict=True) for b in table[slid:]
            )
            self.units.check(self.blocks, users)
            assert all(map(self._is_kept_whole, self.units.spared.values())), (
                "a spared block is not kept"
            )

    def _usable(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks a sequence can start from.

        The last ones, those in its window, must have all their units.
        """
        count = index = len(block_ids)
        if self.units is not None:
            while index > self.layout.num_slid(count * self.block_size, self.block_size):
                index -= 1
                if self.blocks[block_ids[index]].stripped:
                    count = index
        return count

    def _whole_match(self, token_ids: Sequence[int], prefix: PrefixKeys, limit: int) -> list[int]:
        """Return the matching blocks up to the first one without sliding units. Changes nothing."""
        matches = self.match(token_ids, prefix, limit).block_ids
        return list(itertools.takewhile(lambda at: not self.blocks[at].stripped, matches))

    def _room(self) -> int:
        """Return the number of fresh blocks that can be taken now."""
        return min(self._pool.num_free, self.num_free_units() // self.layout.num_units)

    def _release(self, block: Block, in_window: bool) -> None:
        if self.units is not None and in_window:
            self.units.leave(block, still_held=block.ref_count > 1)
        self._pool.release(block)

    def _take(self) -> int:
        if self.units is not None:
            while len(self.units.free) < self.layout.num_units:
                self._free_units(self.units)
        block = self._pool.first_free()
        if block.hash != NO_PREFIX:
            self._evict(block)
        self._pool.hold(block)
        if self.units is not None:
            self.units.assign(block)
        return block.block_id

    def _free_units(self, units: UnitPool) -> None:
        """Free the units that are needed least. Kept blocks come last."""
        if units.reclaim(self._is_kept_whole):
            return
        # a block evicted as a whole can be restored, a stripped one cannot
        strips = self.evicted is None or self._pool.kept.first() is None
        if not (strips and self._pool.only_kept_left() and units.reclaim()):
            self._evict(self._pool.first_named())

    def _is_kept_whole(self, block: Block) -> bool:
        mark = self._pool.kept.marks.get(block.hash)
        return mark is not None and mark.whole

    def _evict(self, block: Block) -> None:
        mark = self._pool.kept.marks.get(block.hash)
        if mark is not None:
            self._hand_over(block, mark)
        self._forget(block)

    def _keep(self, names: list[int], until: float, priority: int, whole_from: int) -> None:
        for name, mark in self._pool.keep(names, until, priority, whole_from):
            self._hand_over(self._pool.blocks[self._pool.names[name]], mark)

    def _hand_over(self, block: Block, mark: Mark) -> None:
        if self.evicted is not None and not block.stripped:
            assert block.namespace is not None, "a named block without a namespace"
            tokens = tuple(self._contents([block.block_id]))
            self.evicted.take(
                EvictedBlock(block.block_id, block.hash, tokens, block.namespace, mark)
            )
