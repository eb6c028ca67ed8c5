"""The directory against a model of each replica's blocks, with lost, late and repeated reports."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from nano_inference.kv_cache.block_changes import BlockChanges, BlockReport
from nano_inference.remote.directory import Directory, FetchCost, Holder, worth_fetching
from tests.depth import at_depth

NAMES = st.lists(st.integers(0, 12), max_size=4)
PICK = st.integers(0, 1000)
HIGH = 1 << 200  # wider than the part of a name that the directory stores


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.has: dict[str, set[int]] = {}
        self.news: dict[str, BlockChanges] = {}
        self.on_the_way: dict[str, list[BlockReport]] = {}
        self.whole_is_due: set[str] = set()
        self.num_added = 0

    @precondition(lambda self: len(self.has) < 4)
    @rule()
    def add(self) -> None:
        self.num_added += 1
        name = f"r{self.num_added}"
        self.directory.add(name)
        self.has[name], self.news[name], self.on_the_way[name] = set(), BlockChanges(most=5), []

    @precondition(lambda self: self.has)
    @rule(pick=PICK)
    def remove(self, pick: int) -> None:
        name = self._pick(pick)
        self.directory.remove(name)
        del self.has[name], self.news[name], self.on_the_way[name]
        self.whole_is_due.discard(name)

    @precondition(lambda self: self.has)
    @rule(pick=PICK, names=NAMES)
    def change(self, pick: int, names: list[int]) -> None:
        name = self._pick(pick)
        for each in names:
            if each in self.has[name]:
                self.has[name].remove(each)
                self.news[name].dropped(HIGH + each)
            else:
                self.has[name].add(each)
                self.news[name].published(HIGH + each)

    @precondition(lambda self: self.has)
    @rule(pick=PICK, lost=st.sampled_from([False, False, True]))
    def report(self, pick: int, lost: bool) -> None:
        name = self._pick(pick)
        report = self.news[name].take(HIGH + each for each in self.has[name])
        if not lost:
            self.on_the_way[name].append(report)

    @precondition(lambda self: self.has)
    @rule(pick=PICK, twice=st.booleans())
    def arrive(self, pick: int, twice: bool) -> None:
        name = self._pick(pick)
        for report in self.on_the_way[name]:
            if not self.directory.take(name, report):
                self.news[name].forget()
            elif twice and not report.whole:
                assert self.directory.take(name, report)
        self.on_the_way[name].clear()

    @precondition(lambda self: self.has)
    @rule(names=NAMES)
    def settle(self, names: list[int]) -> None:
        """Deliver all reports and request the lost ones again: the directory is exact."""
        for name in self.has:
            self.arrive(list(self.has).index(name), twice=False)
            for _ in range(2):
                if not self.directory.take(
                    name, self.news[name].take(HIGH + each for each in self.has[name])
                ):
                    self.news[name].forget()
            held = self._held(name, names)
            assert self.directory.count(name, [HIGH + each for each in names]) == held
        best = max(self._held(name, names) for name in self.has)
        found = self.directory.longest([HIGH + each for each in names])
        assert (found.num_blocks if found else 0) == best
        if found is not None:
            assert self._held(found.replica, names) == best
            only = self.directory.longest(names, [found.replica])
            assert only == found
            assert self.directory.longest(names, []) is None

    def _pick(self, pick: int) -> str:
        return list(self.has)[pick % len(self.has)]

    def _held(self, name: str, names: list[int]) -> int:
        return next(
            (place for place, each in enumerate(names) if each not in self.has[name]), len(names)
        )


TestDirectory = Machine.TestCase
TestDirectory.settings = settings(max_examples=at_depth(40), stateful_step_count=30, deadline=None)


def test_block_directory_is_bounded() -> None:
    directory = Directory(max_names=3)
    directory.add("a")
    assert not directory.take("a", BlockReport(5, (1,)))
    assert directory.take("a", BlockReport(6, (1, 2, 3, 4), whole=True))
    assert directory.count("a", [1, 2, 3, 4]) == 3
    assert directory.take("a", BlockReport(7, (4,), dropped=(2,)))
    assert directory.longest([1, 2, 3]) == Holder("a", 1)
    with pytest.raises(ValueError, match="already"):
        directory.add("a")
    assert directory.count("a", [4]) == 1
    assert directory.count("a", [2]) == 0
    directory.remove("a")
    assert directory.longest([1]) is None
    with pytest.raises(KeyError):
        directory.take("a", BlockReport(8, ()))


def test_thousand_replicas_with_one_stem() -> None:
    directory, stem = Directory(), list(range(10))
    for index in range(1000):
        directory.add(f"r{index}")
        own = tuple(range(1000 * index, 1000 * index + index % 7))
        directory.take(f"r{index}", BlockReport(1, (*stem, *own), whole=True))
    assert directory.longest([*stem, 995_000, 995_001]) == Holder("r995", 11)
    assert directory.longest(stem) == Holder("r0", 10)
    directory.remove("r0")
    assert directory.longest(stem) == Holder("r1", 10)


def test_fetching_is_chosen_if_it_is_faster() -> None:
    directory, names = Directory(), list(range(64))
    for name, count in (("near", 60), ("target", 8), ("far", 64)):
        directory.add(name)
        directory.take(name, BlockReport(1, tuple(names[:count]), whole=True))
    # 16 tokens a block: 1.6 ms to compute. 2 MB: 2 ms to fetch at first
    cost = FetchCost(16, 2_000_000, bandwidth=1e9, prefill_rate=1e4, latency=0.01)
    assert worth_fetching(directory, cost, names, "target") is None
    for _ in range(60):
        cost.fetched(10, 0.01 + 0.005)  # 4 GB/s
    assert worth_fetching(directory, cost, names, "target") == ("far", 64)
    assert directory.count("target", names) == 8
    assert cost.gain(64 - 8) == pytest.approx(56 * 1.6e-3 - 0.01 - 56 * 0.5e-3, rel=1e-3)
    assert worth_fetching(directory, cost, names, "target", ["near"]) == ("near", 60)
    assert worth_fetching(directory, cost, names, "far") is None
    assert worth_fetching(directory, cost, names[:9], "target") is None, (
        "one block is not worth a round trip"
    )
    for _ in range(60):
        cost.prefilled(1000, 0.01)  # ten times as fast
    assert worth_fetching(directory, cost, names, "target") is None
    with pytest.raises(ValueError, match="positive"):
        FetchCost(16, 0)
