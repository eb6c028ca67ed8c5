"""Names of blocks that requests asked to keep, and the order of their eviction.

A kept block is free like any other block that holds a prefix, so it does not affect planning. It is
evicted when nothing else is free, before a sequence is preempted. This module handles names and
times, and `BlockPool` maps the names to blocks.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

# largest share of a cache's blocks that may be kept
KEPT_SHARE = 0.5


class Mark(NamedTuple):
    """Rank of a kept block. Smaller marks are evicted first.

    Attributes:
        priority: Blocks of higher priority are evicted later.
        until: Time, by the clock, until which the block is kept.
        height: Number of blocks before it in its chain, negated: the end of a chain is evicted
            first.
        whole: True if its units of sliding-window layers are kept too.
    """

    priority: int
    until: float
    height: int
    whole: bool


class _Queue:
    """A priority queue of names. Entries that are no longer valid are skipped."""

    def __init__(self, is_valid: Callable[[tuple[float, ...], int], bool]) -> None:
        self._heap: list[tuple[tuple[float, ...], int]] = []
        self._is_valid = is_valid
        self._room = 64

    def push(self, key: tuple[float, ...], name: int) -> None:
        if len(self._heap) >= self._room:  # most entries may be invalid
            self._heap = [entry for entry in set(self._heap) if self._is_valid(*entry)]
            heapq.heapify(self._heap)
            self._room = 2 * len(self._heap) + 64
        heapq.heappush(self._heap, (key, name))

    def first(self) -> tuple[tuple[float, ...], int] | None:
        """Return the smallest key and its name without removing them."""
        while self._heap and not self._is_valid(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class Kept:
    """The kept blocks of a cache, by name.

    A chain is kept from its head: a block's mark is never below the mark of a later block. A block
    that several requests keep has the latest of their times and the highest of their priorities.

    Args:
        most: Maximum number of kept blocks. Beyond that the smallest marks are dropped.
        is_free: Function that returns True if no table holds the block of a name.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        most: int,
        is_free: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most, self.clock = most, clock
        self._is_free = is_free
        self.marks: dict[int, Mark] = {}
        self._all = _Queue(self._is_key)
        self._free = _Queue(lambda key, name: self._is_key(key, name) and is_free(name))
        self._ends = _Queue(lambda end, name: name in self.marks and _end(self.marks[name]) == end)

    def __contains__(self, name: int) -> bool:
        return name in self.marks

    def keep(
        self, names: Sequence[int], until: float, priority: int, whole_from: int = 0
    ) -> tuple[list[int], list[tuple[int, Mark]]]:
        """Keep a chain of blocks from its head.

        The blocks from index `whole_from` on are kept with their units of sliding-window layers.

        Return the names whose marks were added, changed or dropped, in the order of their eviction,
        and the dropped names with their marks.
        """
        changed: dict[int, None] = {}
        for index in reversed(range(len(names))):
            name, old = names[index], self.marks.get(names[index])
            mark = Mark(priority, until, -index, index >= whole_from)
            if old is not None:
                mark = Mark(
                    max(old.priority, priority),
                    max(old.until, until),
                    -index,
                    old.whole or mark.whole,
                )
            if mark != old:
                self._put(name, mark)
                changed[name] = None
        gone = self._cut()
        return [*changed, *(name for name, _ in gone)], gone

    def free(self, name: int) -> None:
        """Record that the block of a kept name has lost its last holder."""
        self._free.push(_key(self.marks[name]), name)

    def first(self) -> int | None:
        """Return the name whose block is evicted next, or None if no kept block is free."""
        entry = self._free.first()
        return None if entry is None else entry[1]

    def drop(self, name: int) -> None:
        """Drop the mark of a name, if it has one."""
        self.marks.pop(name, None)

    def expire(self) -> list[int]:
        """Drop marks whose time is over. Return their names, the end of a chain first."""
        gone: list[int] = []
        now = self.clock()
        while (entry := self._ends.first()) is not None and entry[0][0] <= now:
            gone.append(entry[1])
            del self.marks[entry[1]]
        return gone

    def count(self) -> int:
        """Return the number of names that are kept now. Callable from any thread."""
        now = self.clock()
        return sum(mark.until > now for mark in list(self.marks.values()))

    def check(self, chains: Sequence[Sequence[int]] = ()) -> None:
        """Assert the limit, the queues, and the order within chains of names."""
        assert len(self.marks) <= self.most, "too many blocks are kept"
        first = self._ends.first()
        ends = min(map(_end, self.marks.values()), default=None)
        assert ends == (None if first is None else first[0]), "the next time to expire is wrong"
        least = min(
            (_key(mark) for name, mark in self.marks.items() if self._is_free(name)), default=None
        )
        entry = self._free.first()
        assert least == (None if entry is None else entry[0]), "the next block to evict is wrong"
        for chain in chains:
            marks = [self.marks.get(name) for name in chain]
            for before, behind in itertools.pairwise(marks):
                assert behind is None or (before is not None and _key(before) > _key(behind)), (
                    "a kept block would be evicted before a later block of its chain"
                )

    def _is_key(self, key: tuple[float, ...], name: int) -> bool:
        return name in self.marks and _key(self.marks[name]) == key

    def _put(self, name: int, mark: Mark) -> None:
        self.marks[name] = mark
        self._all.push(_key(mark), name)
        self._ends.push(_end(mark), name)

    def _cut(self) -> list[tuple[int, Mark]]:
        gone: list[tuple[int, Mark]] = []
        while len(self.marks) > self.most:
            entry = self._all.first()
            assert entry is not None, "a mark is missing from its queue"
            gone.append((entry[1], self.marks.pop(entry[1])))
        return gone


def _key(mark: Mark) -> tuple[float, ...]:
    return mark[:3]


def _end(mark: Mark) -> tuple[float, ...]:
    return mark.until, mark.height
