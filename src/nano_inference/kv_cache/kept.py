"""Blocks that a request asked to keep after its end: which of them are evicted last, and in what
order.

A kept block is free like any other that holds a prefix, so nothing that is planned changes: it is
taken when nothing else is free, before a sequence is preempted. Here stand only names and times;
`BlockPool` knows where the blocks are.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

# the part of a cache's blocks that may be kept; what is beyond it is evicted like the others
KEPT_SHARE = 0.5


class Mark(NamedTuple):
    """That a block is kept. Smaller ones are evicted first.

    Attributes:
        priority: higher is evicted later.
        until: by the clock.
        height: blocks before it in its chain, negative: of a chain the last is evicted first.
        whole: what sliding-window layers stored in it is kept too.
    """

    priority: int
    until: float
    height: int
    whole: bool


class _Queue:
    """Names, first the one of the smallest key. One that is not valid any more is passed over."""

    def __init__(self, is_valid: Callable[[tuple[float, ...], int], bool]) -> None:
        self._heap: list[tuple[tuple[float, ...], int]] = []
        self._is_valid = is_valid
        self._room = 64

    def push(self, key: tuple[float, ...], name: int) -> None:
        if len(self._heap) >= self._room:  # most may be of the past
            self._heap = [entry for entry in set(self._heap) if self._is_valid(*entry)]
            heapq.heapify(self._heap)
            self._room = 2 * len(self._heap) + 64
        heapq.heappush(self._heap, (key, name))

    def first(self) -> tuple[tuple[float, ...], int] | None:
        """Key and name. It stays."""
        while self._heap and not self._is_valid(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class Kept:
    """The kept blocks of a cache, by name.

    A chain is kept from its head on: a block's mark is never below that of one behind it. A block
    that several requests keep has the latest of their times and the highest of their priorities.

    Args:
        most: blocks that may be kept; beyond that the smallest marks go.
        clock: seconds.
        is_free: whether the block of a name has no holder.
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
        """Keep a chain of blocks from its head on, those from place `whole_from` on as a whole.

        Returns the names whose marks have come, changed or gone, in the order in which they would
        be evicted; and those whose marks are gone, with these.
        """
        changed: dict[int, None] = {}
        for place in reversed(range(len(names))):
            name, old = names[place], self.marks.get(names[place])
            mark = Mark(priority, until, -place, place >= whole_from)
            if old is not None:
                mark = Mark(
                    max(old.priority, priority),
                    max(old.until, until),
                    -place,
                    old.whole or mark.whole,
                )
            if mark != old:
                self._put(name, mark)
                changed[name] = None
        gone = self._cut()
        return [*changed, *(name for name, _ in gone)], gone

    def free(self, name: int) -> None:
        """The block of a kept name has no holder any more."""
        self._free.push(_key(self.marks[name]), name)

    def first(self) -> int | None:
        """The name whose block is to be evicted next; None: no kept block is free."""
        found = self._free.first()
        return None if found is None else found[1]

    def drop(self, name: int) -> None:
        """The name is gone."""
        self.marks.pop(name, None)

    def expire(self) -> list[int]:
        """Let go of those whose time has come; returns them, of a chain the last first."""
        gone: list[int] = []
        now = self.clock()
        while (found := self._ends.first()) is not None and found[0][0] <= now:
            gone.append(found[1])
            del self.marks[found[1]]
        return gone

    def count(self) -> int:
        """Names that are kept now. For any thread."""
        now = self.clock()
        return sum(mark.until > now for mark in list(self.marks.values()))

    def check(self, chains: Sequence[Sequence[int]] = ()) -> None:
        """Assert the bound, the queues, and the order in these chains of names, heads first."""
        assert len(self.marks) <= self.most, "more is kept than may be"
        first = self._ends.first()
        ends = min(map(_end, self.marks.values()), default=None)
        assert ends == (None if first is None else first[0]), "the next end is not known"
        least = min(
            (_key(mark) for name, mark in self.marks.items() if self._is_free(name)), default=None
        )
        found = self._free.first()
        assert least == (None if found is None else found[0]), "the next victim is not known"
        for chain in chains:
            marks = [self.marks.get(name) for name in chain]
            for before, behind in itertools.pairwise(marks):
                assert behind is None or (before is not None and _key(before) > _key(behind)), (
                    "a kept block would be evicted before one behind it"
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
            found = self._all.first()
            assert found is not None, "a mark stands in no queue"
            gone.append((found[1], self.marks.pop(found[1])))
        return gone


def _key(mark: Mark) -> tuple[float, ...]:
    return mark[:3]


def _end(mark: Mark) -> tuple[float, ...]:
    return mark.until, mark.height
