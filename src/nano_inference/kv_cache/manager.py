"""`KVCacheManager`: block tables over one block pool. What can be shared is found by a hash table
or a radix tree.
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


class Found(NamedTuple):
    """Named blocks of a chain: what they depend on, where they are, what they hold."""

    namespace: Namespace
    block_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class EvictedBlock(NamedTuple):
    """A kept block that is about to be reused, or kept no more, and what it holds."""

    block_id: int
    name: int
    token_ids: tuple[int, ...]
    namespace: Namespace
    mark: Mark


class EvictedBlocks(Protocol):
    """Storage of evicted kept blocks.

    A Protocol, because `device.kept_files.KeptFiles` has tensors and is in a layer above.
    """

    def take(self, block: EvictedBlock) -> None:
        """This block may be reused when the call has returned."""
        ...

    def forget(self, is_dead: Callable[[Namespace], bool]) -> None:
        """Blocks of these namespaces will not be asked for again."""
        ...


class KVCacheManager(ABC):
    """Block tables over one block pool. A block table is a list of block ids owned by one sequence;
    its first `layout.num_slid(tokens computed)` blocks have left its window.

    How prefixes are found is left to `PagedKVCache` and `RadixKVCache`. A block is named (its
    `hash` is set) exactly while they find it.

    A block is matchable from the launch of the step that fills it until it is reused. Only full
    blocks have a name, and a named block is never written again, so sharing needs no lock; a
    partial block shared by a fork is copied on the first write.

    `evicted` is given kept blocks before they are reused, and those that are more than may be kept;
    None: they are lost.

    Where layers have a window, `units` knows what memory stands behind a block; otherwise a block
    is its memory.
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

        Args:
            num_blocks: block ids in all.
            block_size: tokens of a block.
            layout: what a block costs.
            num_units: of the memory; None: enough for all blocks to be within the window.
            evicted: returns where kept blocks go that are evicted; it may be made later.

        Raises `ValueError` for sizes that are not positive.
        """
        if num_units is None:
            num_units = num_blocks * layout.num_units
        if num_blocks < 1 or block_size < 1 or num_units < 1:
            raise ValueError(
                f"a KV cache needs positive sizes, not {num_blocks} blocks of {block_size} tokens."
            )
        self.num_blocks, self.block_size, self.layout = num_blocks, block_size, layout
        # without a window a block is its unit
        self.num_units = num_blocks if layout == UNIFORM else num_units
        self.units = None if layout == UNIFORM else UnitPool(num_units, num_blocks, layout)
        told = (self.units.give_back, self.units.spare_no_more) if self.units is not None else ()
        self._pool = BlockPool(num_blocks, *told)
        self._evicted = evicted

    @property
    def evicted(self) -> EvictedBlocks | None:
        """Where kept blocks go that are evicted; None: they are lost."""
        return self._evicted()

    @property
    def blocks(self) -> list[Block]:
        """All blocks, by id."""
        return self._pool.blocks

    def num_free_blocks(self) -> int:
        """Blocks that no table holds, matchable ones included."""
        return self._pool.num_free

    def num_cached_blocks(self) -> int:
        """Blocks that no table holds and that a prefix can still be found in."""
        return self._pool.num_cached

    def num_shared_blocks(self) -> int:
        """Blocks that more than one table holds."""
        return self._pool.num_shared

    def num_free_units(self) -> int:
        """Units that no table needs, those of matchable blocks included."""
        if self.units is None:
            return self._pool.num_free
        held = self.num_blocks - self._pool.num_free
        needed = self.layout.num_full * held + self.layout.num_sliding * self.units.num_in_window
        return self.num_units - needed

    def share_in_use(self) -> float:
        """Share of the memory that sequences hold, the larger one of two memories; the rest
        may hold prefixes.
        """
        units = 1 - self.num_free_units() / self.num_units
        return (
            max(units, 1 - self._pool.num_free / self.num_blocks) if self.layout.beside else units
        )

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold this block."""
        return self._pool.blocks[block_id].ref_count

    def num_users(self, block_id: int) -> int:
        """How many block tables have this block in their window."""
        return self.blocks[block_id].num_users

    def match(self, token_ids: Sequence[int], prefix: PrefixKeys, limit: int) -> CacheAllocation:
        """The longest cached prefix of at most `limit` tokens, in whole blocks. Token ids are
        compared; no writes.

        The blocks within the window of the token after it have all their units; blocks before those
        may be stripped.
        """
        found = self._found(token_ids, prefix, min(limit, len(token_ids)) // self.block_size)
        block_ids = tuple(found[: self._usable(found)])
        return CacheAllocation(block_ids, len(block_ids) * self.block_size)

    def allocate(
        self, token_ids: Sequence[int], *, prefix: PrefixKeys | None = None
    ) -> CacheAllocation:
        """Blocks for all of `token_ids`: cached ones first, fresh ones after them. The last token
        is never cached.

        Raises `RuntimeError`, with nothing taken, where too few blocks are free. All blocks count
        as within the window.
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
            raise RuntimeError(f"{fresh} KV blocks are needed and {room} are free.")
        self.extend(table, cached_length, len(token_ids))
        return CacheAllocation(tuple(table), cached_length)

    def adopt(self, block_ids: Sequence[int], num_slid: int = 0) -> None:
        """Hold these blocks once more; the first `num_slid` are outside the window of the table
        that does.
        """
        for block_id in block_ids:
            self._pool.hold(self.blocks[block_id])
        if self.units is not None:
            for block_id in block_ids[:num_slid]:
                self.units.offer(self.blocks[block_id])
            for block_id in block_ids[num_slid:]:
                self.units.enter(self.blocks[block_id])

    def extend(self, table: list[int], start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Make positions [start, end) writable: own the block that `start` stands in, append fresh
        ones up to `end`.

        Returns the copies (source block, target block) that must run before anything is written.
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
        """The sequence goes on at position `end` instead of `start`: let go of the blocks that left
        its window.

        What sliding-window layers stored in them stays matchable until it is taken.
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
        """Make these full blocks matchable. Where the contents are already matchable elsewhere,
        that stays, unless stripped.
        """

    def deallocate(self, block_ids: Sequence[int], num_slid: int = 0) -> None:
        """Let go of a block table, its tail first: heads of prefixes are reused last."""
        if self.units is None:
            self._pool.release_all(reversed(block_ids))
            return
        for place in reversed(range(len(block_ids))):
            self._release(self.blocks[block_ids[place]], in_window=place >= num_slid)

    def drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version; their free blocks are reused first."""
        self._drop_version(weight_set, version)
        if self.evicted is not None:
            self.evicted.forget(
                lambda space: (space.weight_set, space.version) == (weight_set, version)
            )

    @abstractmethod
    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay in use."""

    def keep(self, prefix: PrefixKeys, start: int, seconds: float, priority: int) -> None:
        """Keep the blocks of a chain, as far as they can be matched, so many seconds from now: they
        are evicted last, of lower `priority` first. Rows of layers with a window are kept as far
        as a row from position `start` on sees it; where evicted blocks come back, as a whole.
        """
        start = start if self.evicted is None else 0
        names = list(itertools.takewhile(self._pool.names.__contains__, prefix.hashes))
        until = self._pool.kept.clock() + seconds
        self._pool.expire()
        self._keep(names, until, priority, self.layout.num_slid(start, self.block_size))

    def keep_again(self, names: list[int], mark: Mark) -> None:
        """Keep a chain whose last block had this mark before it was evicted."""
        start = len(names) - 1 if mark.whole else len(names)
        self._keep(names, mark.until, mark.priority, start)

    def expire_kept(self) -> None:
        """Blocks whose time is over are evicted like others. O(1) where there is none."""
        if self._pool.kept.marks:
            self._pool.expire()

    def let_go_adapter(self, adapter: str) -> None:
        """Do not keep what this version of an adapter computed: none will ask for it again."""
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
        """What requests asked to keep."""
        return self._pool.kept

    @abstractmethod
    def _drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version."""

    @abstractmethod
    def _found(
        self, token_ids: Sequence[int], prefix: PrefixKeys, num_blocks: int
    ) -> Sequence[int]:
        """Blocks that hold the head of a sequence, at most `num_blocks`. Writes nothing."""

    @abstractmethod
    def _contents(self, block_ids: Sequence[int]) -> list[int]:
        """Token ids of named blocks."""

    @abstractmethod
    def _forget(self, block: Block) -> None:
        """Drop a named block that is about to be reused."""

    @abstractmethod
    def _check_names(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that names and what finds them agree, for these tables."""

    # -- between engines ---------------------------------------------------------------------------

    def find(self, names: Sequence[int]) -> Found:
        """The blocks of these names, which are a chain from the head of a sequence, as far as they
        are here.

        No writes. They are whole: what lacks its units of sliding layers, and all behind it, is not
        found.
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
        """How many blocks at the head of this chain are here, whole. Token ids are not compared."""
        blocks, ids = self.blocks, map(self._pool.names.get, names)
        return sum(
            1
            for _ in itertools.takewhile(lambda at: at is not None and not blocks[at].stripped, ids)
        )

    def reserve(
        self, token_ids: Sequence[int], prefix: PrefixKeys, start: int, end: int
    ) -> tuple[list[int], int]:
        """A table for blocks [0, end) of a sequence, and how many of them are cached: the rest are
        to be written.

        The table is empty where block `start` would not follow what is cached, and shorter than
        `end` where too few blocks are free. Who called it writes the fresh blocks, publishes them
        and lets go of the table.
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
        """Tell `changes` (None: nothing) from now on of names that come and go; returns those that
        are here.
        """
        self._pool.changes = changes
        return list(self._pool.names)

    def check(self, tables: Iterable[Sequence[int]], num_slid: Iterable[int] | None = None) -> None:
        """Assert every invariant of pool, index, units and tables. For tests and debugging;
        O(blocks).
        """
        tables = list(tables)
        self._pool.check()
        held = Counter(block_id for table in tables for block_id in table)
        for block in self.blocks:
            assert block.ref_count == held[block.block_id], (
                f"block {block.block_id}: count and tables disagree"
            )
            nameless = block == Block(block.block_id, block.ref_count) and block.above is None
            assert nameless or block.hash != NO_PREFIX, (
                "a block without a name has contents, or a place in a path"
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
                "a block is spared that is not kept"
            )

    def _usable(self, found: Sequence[int]) -> int:
        """How many of these blocks a sequence can start from: the last ones, those in its window,
        must be whole.
        """
        count = place = len(found)
        if self.units is not None:
            while place > self.layout.num_slid(count * self.block_size, self.block_size):
                place -= 1
                if self.blocks[found[place]].stripped:
                    count = place
        return count

    def _whole_match(self, token_ids: Sequence[int], prefix: PrefixKeys, limit: int) -> list[int]:
        """The matching blocks up to the first that lacks its sliding units. Writes nothing."""
        found = self.match(token_ids, prefix, limit).block_ids
        return list(itertools.takewhile(lambda at: not self.blocks[at].stripped, found))

    def _room(self) -> int:
        """Fresh blocks that can be taken now."""
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
        """Take units from what is needed least: what is kept comes last."""
        if units.reclaim(self._is_kept_whole):
            return
        # a block that is evicted as a whole can come back, one that is stripped cannot
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
