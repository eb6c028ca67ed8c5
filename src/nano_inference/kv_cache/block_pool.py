"""Block ids, reference counts, and the order in which free blocks are reused.

The order is a ring, which any block can leave in O(1).
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
    """One KV block. `hash` names its contents while it is matchable, otherwise it is -1.

    Attributes:
        block_id: Index in the KV tensors.
        ref_count: Number of block tables that hold it.
        hash: Name of its contents.
        parent: Name of the block before it (hash cache only).
        token_ids: Its token ids (hash cache only; the radix cache stores them in its tree).
        namespace: Everything else that its contents depend on.
        above: Previous block of the path, which must not be reused before this one.
        pins: Number of blocks directly below it that are in use or pinned themselves.
        num_users: Number of block tables that have it in their window, if layers have a window.
        stripped: True if its units of sliding-window layers were taken.
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
        """Clear the name, so that the block is no longer matchable."""
        self.hash, self.parent, self.token_ids, self.namespace, self.above = (
            NO_PREFIX,
            NO_PREFIX,
            (),
            None,
            None,
        )


class BlockPool:
    """All blocks of a cache, with free blocks in the order of their reuse.

    Unnamed blocks come first. Named blocks follow, least recently used first, and none before a
    block below it. Then come pinned blocks: a block below them is in use, so reusing one would lose
    more than its own contents. Kept blocks come last, in the order of `kept`.

    Args:
        num_blocks: Number of blocks.
        emptied: Function called with a free block that has no name or has lost it.
        unkept: Function called with a block that is no longer kept.

    Attributes:
        num_cached: Number of free blocks with a name, which can still be matched.
        num_shared: Number of blocks with more than one holder.
        names: Id of every named block, by name.
        changes: Records published and dropped names. None if nothing follows them.
        kept: Names that requests asked to keep.
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
        # Four sentinels split the ring: head, unnamed blocks, gate, named blocks, bar, pinned
        # blocks, rail, kept blocks.
        self._head, self._gate, self._bar, self._rail = range(num_blocks, num_blocks + 4)
        self._next = [*range(1, num_blocks), self._gate, 0, self._bar, self._rail, self._head]
        self._previous = [self._head, *range(num_blocks - 1)]
        self._previous += [self._rail, num_blocks - 1, self._gate, self._bar]

    def first_free(self) -> Block:
        """Return the free block to reuse next. The caller must forget its name."""
        first = self._next[self._head]
        return self.blocks[first] if first != self._gate else self.first_named()

    def first_named(self) -> Block:
        """Return the named free block to reuse next."""
        block = self._first_not_kept()
        if block is not None:
            return block
        name = self.kept.first()
        if name is None:
            raise RuntimeError("no KV block is free; the plan exceeds the cache.")
        return self.blocks[self.names[name]]

    def only_kept_left(self) -> bool:
        """Return True if every named free block is kept, or there is none."""
        return self._first_not_kept() is None

    def keep(
        self, names: list[int], until: float, priority: int, whole_from: int
    ) -> list[tuple[int, Mark]]:
        """Keep the blocks of a chain, from its head, until a time of the clock.

        Return the names that exceed the limit, with the marks that they had.
        """
        changed, gone = self.kept.keep(names, until, priority, whole_from)
        self._reorder(changed)
        return gone

    def expire(self) -> None:
        """Stop keeping blocks whose time is over."""
        self._reorder(self.kept.expire())

    def let_go(self, names: Iterable[int]) -> None:
        """Stop keeping these blocks."""
        kept = sorted(set(names) & self.kept.marks.keys(), key=self.kept.marks.__getitem__)
        for name in kept:
            self.kept.drop(name)
        self._reorder(kept)

    def hold(self, block: Block) -> None:
        """Add a holder. A free block leaves the ring."""
        if block.ref_count == 0:
            self._unlink(block.block_id)
            self.num_cached -= block.hash != NO_PREFIX
            if not block.pins:
                self._pin(block.above)
        elif block.ref_count == 1:
            self.num_shared += 1
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Remove a holder.

        A block without holders becomes the most recently used free block of its kind.
        """
        if block.ref_count <= 0:
            raise RuntimeError(f"block {block.block_id} was released too often: it has no holder.")
        block.ref_count -= 1
        if block.ref_count == 1:
            self.num_shared -= 1
        elif block.ref_count == 0:
            self._link(block)
            self.num_cached += block.hash != NO_PREFIX
            if not block.pins:
                self._unpin(block.above)

    def release_all(self, block_ids: Iterable[int]) -> None:
        """Release many blocks in order, fast: aborting all requests releases thousands."""
        blocks, release = self.blocks, self.release
        for block_id in block_ids:
            block = blocks[block_id]
            if block.ref_count > 2:
                block.ref_count -= 1
            else:
                release(block)

    def give_name(self, block: Block, name: int, namespace: Namespace | None) -> None:
        """Publish a block's contents under a name, which another block may have had until now."""
        if self.changes is not None and name not in self.names:
            self.changes.published(name)
        self.num_cached += block.ref_count == 0 and block.hash == NO_PREFIX
        block.hash, block.namespace = name, namespace
        self.names[name] = block.block_id

    def put_below(self, block: Block, above: Block | None) -> None:
        """Prevent `above` from being reused before `block`, which is held."""
        block.above = above
        self._pin(above)

    def exchange(self, old: Block, new: Block, below: list[Block]) -> None:
        """Replace `old` by `new`, which is held, above the blocks in `below`.

        `old` loses its name.
        """
        self.put_below(new, old.above)
        for block in below:
            block.above = new
            if block.ref_count or block.pins:
                self._pin(new)
                self._unpin(old)
        self.forget(old)

    def forget(self, block: Block) -> None:
        """Drop the name of a block without blocks below it. A free block is then reused first."""
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
        """Return the ids of free blocks in the order of reuse."""
        ids, marks = [at for at in self._ring() if at < len(self.blocks)], self.kept.marks
        kept = sorted(
            (at for at in ids if self.blocks[at].hash in marks),
            key=lambda at: marks[self.blocks[at].hash],
        )
        return [at for at in ids if self.blocks[at].hash not in marks] + kept

    def check(self) -> None:
        """Assert that the ring is intact, in order, and made of the blocks without holders."""
        ids = self.free_ids()
        assert len(ids) == self.num_free == len(set(ids)), "free list and num_free disagree"
        assert set(ids) == {b.block_id for b in self.blocks if b.ref_count == 0}, (
            "free list and reference counts disagree"
        )
        for left, right in itertools.pairwise([self._head, *self._ring(), self._head]):
            assert self._next[left] == right, "free list is broken forwards"
            assert self._previous[right] == left, "free list is broken backwards"
        named = sum(1 for at in ids if self.blocks[at].hash != NO_PREFIX)
        assert self.num_cached == named, "cached blocks and num_cached disagree"
        shared = sum(1 for block in self.blocks if block.ref_count > 1)
        assert self.num_shared == shared, "shared blocks and num_shared disagree"
        ring = self._ring()
        starts = [0, *(ring.index(at) + 1 for at in (self._gate, self._bar, self._rail))]
        kinds = [self._kind(self.blocks[at]) for at in ring if at < len(self.blocks)]
        assert kinds == sorted(kinds), "free list is not ordered by kind"
        for kind, (start, end) in enumerate(itertools.pairwise([*starts, len(ring) + 1])):
            assert kinds.count(kind) == end - start - 1, "gate, bar or rail is misplaced"
        self.kept.check([self._path(block) for block in self.blocks if block.hash != NO_PREFIX])
        pins = Counter(
            b.above.block_id for b in self.blocks if b.above is not None and (b.ref_count or b.pins)
        )
        places = {block_id: index for index, block_id in enumerate(ids)}
        for block in self.blocks:
            assert block.pins == pins[block.block_id], (
                f"block {block.block_id}: pins and blocks below it disagree"
            )
            above = block.above
            if (
                above is not None
                and block.block_id in places
                and above.ref_count == above.pins == 0
            ):
                assert places[block.block_id] < places[above.block_id], (
                    "a block would be reused before a block below it"
                )

    def _pin(self, block: Block | None) -> None:
        """Count a block below as in use.

        Walks up to the first block that is already pinned or held, so pinning a path costs O(1) per
        block.
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
        """Move free blocks to the position that their marks require."""
        for name in names:
            block = self.blocks[self.names[name]]
            if self._unkept is not None and name not in self.kept:
                self._unkept(block)
            if block.ref_count == 0:
                self._requeue(block)

    def _kind(self, block: Block) -> int:
        """Return the kind of a free block: 0 unnamed, 1 named, 2 pinned, 3 kept."""
        if block.hash == NO_PREFIX:
            return 0
        return 3 if block.hash in self.kept else 1 + (block.pins > 0)

    def _path(self, block: Block) -> list[int]:
        """Return the names of a block and the block directly above it, if known."""
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
        # last of its kind; an unnamed block goes to the front
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
