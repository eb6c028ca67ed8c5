"""Block ids, reference counts, and the order in which free blocks are reused: a ring that any block
leaves in O(1).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from nano_inference.kv_cache.block_changes import BlockChanges
from nano_inference.kv_cache.block_hash import NO_PREFIX, Namespace
from nano_inference.kv_cache.kept import KEPT_SHARE, Kept, Mark

_NONE = -1  # not in the ring


@dataclass(slots=True)
class Block:
    """One KV block. `hash` names its contents while it is matchable, else it is -1.

    Attributes:
        block_id: its place in the KV tensors.
        ref_count: how many block tables hold it.
        hash: the name of its contents.
        parent: the name of the block before it (where names are what is searched).
        token_ids: its contents (where names are what is searched; a tree keeps them in its edges).
        namespace: what else its contents depend on.
        above: the block before it, where that must not be reused before this one.
        pins: blocks right below it that are in use, or pinned themselves.
        num_users: block tables that have it in their window (where there is one).
        stripped: what sliding-window layers stored in it is gone.
    """

    block_id: int
    ref_count: int = 0
    hash: int = NO_PREFIX
    parent: int = NO_PREFIX
    token_ids: tuple[int, ...] = ()
    namespace: Namespace | None = None
    above: "Block | None" = field(default=None, repr=False, compare=False)
    pins: int = 0
    num_users: int = field(default=0, compare=False)
    stripped: bool = field(default=False, compare=False)

    def forget(self) -> None:
        """Drop the name: the block is no longer matchable."""
        self.hash, self.parent, self.token_ids, self.namespace, self.above = (
            NO_PREFIX,
            NO_PREFIX,
            (),
            None,
            None,
        )


class BlockPool:
    """All blocks of a cache. Free blocks stand in the order of their reuse.

    First those without a name; then named ones, the longest unused first, none before a block below
    it; then those that are pinned: something below them is in use, so their reuse would cost more
    than one block's contents; last those that are kept, in the order of `kept`. `emptied` is called
    with a block that is free and has no name (any more), `unkept` with one that is kept no more.

    Attributes:
        num_cached: free blocks with a name: what they hold can still be found.
        num_shared: blocks with more than one holder.
        names: of every named block: its name, and its id.
        changes: is told of names that come and go; None: nothing follows them.
        kept: names that requests asked to keep.
    """

    def __init__(
        self,
        num_blocks: int,
        emptied: Callable[[Block], None] | None = None,
        unkept: Callable[[Block], None] | None = None,
    ) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_free = num_blocks
        self.num_cached = self.num_shared = 0
        self.names: dict[int, int] = {}
        self.changes: BlockChanges | None = None
        self.kept = Kept(int(KEPT_SHARE * num_blocks), self._is_free)
        self._emptied, self._unkept = emptied, unkept
        # Four elements of the ring are no blocks: the head, the gate before the named ones, the
        # bar before the pinned, the rail before the kept.
        self._head, self._gate, self._bar, self._rail = range(num_blocks, num_blocks + 4)
        self._next = [*range(1, num_blocks), self._gate, 0, self._bar, self._rail, self._head]
        self._previous = [self._head, *range(num_blocks - 1)]
        self._previous += [self._rail, num_blocks - 1, self._gate, self._bar]

    def first_free(self) -> Block:
        """The free block to reuse next. Its name is left for the caller to forget."""
        first = self._next[self._head]
        return self.blocks[first] if first != self._gate else self.first_named()

    def first_named(self) -> Block:
        """The free block with a name to reuse next."""
        block = self._first_not_kept()
        if block is not None:
            return block
        name = self.kept.first()
        if name is None:
            raise RuntimeError("no free KV block: the plan promised more than the cache has.")
        return self.blocks[self.names[name]]

    def only_kept_left(self) -> bool:
        """Whether every free block with a name is a kept one, or there is none."""
        return self._first_not_kept() is None

    def keep(
        self, names: list[int], until: float, priority: int, whole_from: int
    ) -> list[tuple[int, Mark]]:
        """Keep the blocks of a chain, from its head on, until a time of the clock. Returns those
        that are more than may be kept: their names, and the marks that they had.
        """
        changed, gone = self.kept.keep(names, until, priority, whole_from)
        self._reorder(changed)
        return gone

    def expire(self) -> None:
        """Blocks whose time has come are free like others."""
        self._reorder(self.kept.expire())

    def let_go(self, names: Iterable[int]) -> None:
        """Do not keep these blocks any more."""
        kept = sorted(set(names) & self.kept.marks.keys(), key=self.kept.marks.__getitem__)
        for name in kept:
            self.kept.drop(name)
        self._reorder(kept)

    def hold(self, block: Block) -> None:
        """Count one more holder; a free block leaves the ring."""
        if block.ref_count == 0:
            self._unlink(block.block_id)
            self.num_cached -= block.hash != NO_PREFIX
            if not block.pins:
                self._pin(block.above)
        elif block.ref_count == 1:
            self.num_shared += 1
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Count one holder less; a block without a holder becomes free: the most recently used of
        its kind.
        """
        if block.ref_count <= 0:
            raise RuntimeError(f"block {block.block_id} was released more often than it was held.")
        block.ref_count -= 1
        if block.ref_count == 1:
            self.num_shared -= 1
        elif block.ref_count == 0:
            self._link(block)
            self.num_cached += block.hash != NO_PREFIX
            if not block.pins:
                self._unpin(block.above)

    def release_all(self, block_ids: Iterable[int]) -> None:
        """`release` of many, one after the other. An abort of everything lets go of thousands."""
        blocks, release = self.blocks, self.release
        for block_id in block_ids:
            block = blocks[block_id]
            if block.ref_count > 2:
                block.ref_count -= 1
            else:
                release(block)

    def give_name(self, block: Block, name: int, namespace: Namespace | None) -> None:
        """From now on the contents of this block are known under a name, which another block may
        have had so far.
        """
        if self.changes is not None and name not in self.names:
            self.changes.published(name)
        self.num_cached += block.ref_count == 0 and block.hash == NO_PREFIX
        block.hash, block.namespace = name, namespace
        self.names[name] = block.block_id

    def put_below(self, block: Block, above: Block | None) -> None:
        """From now on `above` is not reused before `block`, which is held."""
        block.above = above
        self._pin(above)

    def exchange(self, old: Block, new: Block, below: list[Block]) -> None:
        """`new`, which is held, takes the place of `old` above the blocks `below`; `old` loses its
        name.
        """
        self.put_below(new, old.above)
        for block in below:
            block.above = new
            if block.ref_count or block.pins:
                self._pin(new)
                self._unpin(old)
        self.forget(old)

    def forget(self, block: Block) -> None:
        """Drop the name of a block that has nothing below it. If it is free, it is reused first."""
        above = block.above
        if self.names.get(block.hash) == block.block_id:
            del self.names[block.hash]
            self.kept.drop(block.hash)
            if self.changes is not None:
                self.changes.dropped(block.hash)
        self.num_cached -= block.ref_count == 0 and block.hash != NO_PREFIX
        block.forget()
        if self._unkept is not None:
            self._unkept(block)
        if block.ref_count:
            self._unpin(above)
        else:
            self._requeue(block)

    def free_ids(self) -> list[int]:
        """Free block ids from first to be reused to last."""
        ids, marks = [at for at in self._ring() if at < len(self.blocks)], self.kept.marks
        kept = sorted(
            (at for at in ids if self.blocks[at].hash in marks),
            key=lambda at: marks[self.blocks[at].hash],
        )
        return [at for at in ids if self.blocks[at].hash not in marks] + kept

    def check(self) -> None:
        """Assert that the ring is whole, holds exactly the blocks without a holder, and is in
        order.
        """
        ids = self.free_ids()
        assert len(ids) == self.num_free == len(set(ids)), "free list and its length disagree"
        assert set(ids) == {b.block_id for b in self.blocks if b.ref_count == 0}, (
            "free list and counts disagree"
        )
        for left, right in itertools.pairwise([self._head, *self._ring(), self._head]):
            assert self._next[left] == right, "free list is torn"
            assert self._previous[right] == left, "free list is torn backwards"
        named = sum(1 for at in ids if self.blocks[at].hash != NO_PREFIX)
        assert self.num_cached == named, "cached blocks and their count disagree"
        shared = sum(1 for block in self.blocks if block.ref_count > 1)
        assert self.num_shared == shared, "shared blocks and their count disagree"
        ring = self._ring()
        starts = [0, *(ring.index(at) + 1 for at in (self._gate, self._bar, self._rail))]
        kinds = [self._kind(self.blocks[at]) for at in ring if at < len(self.blocks)]
        assert kinds == sorted(kinds), "free list: not unnamed, then named, pinned and kept"
        for kind, (start, end) in enumerate(itertools.pairwise([*starts, len(ring) + 1])):
            assert kinds.count(kind) == end - start - 1, "gate, bar or rail is misplaced"
        self.kept.check([self._path(block) for block in self.blocks if block.hash != NO_PREFIX])
        pins = Counter(
            b.above.block_id for b in self.blocks if b.above is not None and (b.ref_count or b.pins)
        )
        places = {block_id: place for place, block_id in enumerate(ids)}
        for block in self.blocks:
            assert block.pins == pins[block.block_id], (
                f"block {block.block_id}: pins and what is below it disagree"
            )
            above = block.above
            if (
                above is not None
                and block.block_id in places
                and above.ref_count == above.pins == 0
            ):
                assert places[block.block_id] < places[above.block_id], (
                    "a block is reused before one below it"
                )

    def _pin(self, block: Block | None) -> None:
        """One more of the blocks below is in use. Goes up until a block that was so already: O(1)
        for a whole path.
        """
        while block is not None:
            block.pins += 1
            if block.pins > 1 or block.ref_count:
                return
            self._requeue(block)
            block = block.above

    def _unpin(self, block: Block | None) -> None:
        while block is not None:
            block.pins -= 1
            if block.pins or block.ref_count:
                return
            self._requeue(block)
            block = block.above

    def _is_free(self, name: int) -> bool:
        return self.blocks[self.names[name]].ref_count == 0

    def _first_not_kept(self) -> Block | None:
        first = self._next[self._gate]
        if first == self._bar:
            first = self._next[self._bar]
        return None if first == self._rail else self.blocks[first]

    def _reorder(self, names: Iterable[int]) -> None:
        """Put free blocks where their marks say."""
        for name in names:
            block = self.blocks[self.names[name]]
            if self._unkept is not None and name not in self.kept:
                self._unkept(block)
            if block.ref_count == 0:
                self._requeue(block)

    def _kind(self, block: Block) -> int:
        """Of a free block: 0 without a name, 1 with one, 2 pinned, 3 kept."""
        if block.hash == NO_PREFIX:
            return 0
        return 3 if block.hash in self.kept else 1 + (block.pins > 0)

    def _path(self, block: Block) -> list[int]:
        """Names of a block and of the one right above it, if that is known."""
        return [each.hash for each in (block.above, block) if each is not None]

    def _requeue(self, block: Block) -> None:
        self._unlink(block.block_id)
        self._link(block)

    def _ring(self) -> list[int]:
        elements: list[int] = []
        at = self._next[self._head]
        while at != self._head:
            elements.append(at)
            at = self._next[at]
        return elements

    def _unlink(self, at: int) -> None:
        left, right = self._previous[at], self._next[at]
        self._next[left], self._previous[right] = right, left
        self._next[at] = self._previous[at] = _NONE
        self.num_free -= 1

    def _link(self, block: Block) -> None:
        kind = self._kind(block)
        # last of its kind; those without a name come first of all
        after = (
            self._previous[(self._bar, self._rail, self._head)[kind - 1]] if kind else self._head
        )
        if not kind and self._emptied is not None:
            self._emptied(block)
        at, right = block.block_id, self._next[after]
        self._next[after] = self._previous[right] = at
        self._previous[at], self._next[at] = after, right
        self.num_free += 1
        if block.hash in self.kept:
            self.kept.free(block.hash)
