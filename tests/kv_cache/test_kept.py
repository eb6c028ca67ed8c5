"""Kept blocks survive pressure that evicts others, and never delay a request."""

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nano_inference import PagedKVCache, RadixKVCache
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.kept import Mark
from nano_inference.kv_cache.manager import EvictedBlock, KVCacheManager
from nano_inference.kv_cache.sliding_window import UNIFORM, BlockLayout
from tests.depth import at_depth

CACHES = [PagedKVCache, RadixKVCache]
SIZE = 2
WINDOW = BlockLayout(num_full=1, num_sliding=1, window=3)


def keys(tokens: list[int], version: int = 0, adapter: str | None = None) -> PrefixKeys:
    prefix = PrefixKeys(Namespace(version=version, adapter=adapter))
    prefix.extend(tokens, SIZE)
    return prefix


class Evicted:
    """Record offloaded blocks."""

    def __init__(self) -> None:
        self.blocks: list[EvictedBlock] = []

    def take(self, block: EvictedBlock) -> None:
        self.blocks.append(block)

    def forget(self, is_dead: Callable[[Namespace], bool]) -> None:
        self.blocks = [each for each in self.blocks if not is_dead(each.namespace)]


class KeptMachine(RuleBasedStateMachine):
    """Random requests that start, end and are kept while time passes.

    The model is one list of kept chains and their expiry. Below the bound, exactly the chains
    that have not expired are marked. A request that fits into free blocks always gets them.
    """

    cache_type: type[KVCacheManager]
    layout: BlockLayout

    @initialize(num_blocks=st.integers(4, 24))
    def build(self, num_blocks: int) -> None:
        layout = type(self).layout
        # so few units that blocks outside a window must give up theirs
        num_units = max(2 * layout.num_units, num_blocks * layout.num_units * 2 // 3)
        self.evicted = Evicted()
        self.cache = type(self).cache_type(
            *(num_blocks, SIZE), layout=layout, num_units=num_units, evicted=lambda: self.evicted
        )
        self.now, self.version = 0.0, 0
        self.cache.kept.clock = lambda: self.now
        self.live: list[tuple[list[int], PrefixKeys, list[int]]] = []

    @rule(stem=st.integers(0, 3), length=st.integers(1, 16))
    def come(self, stem: int, length: int) -> None:
        tokens = [stem] * (length // 2) + [(stem + 3) * place % 5 for place in range(length)]
        prefix = keys(tokens, self.version)
        need = -(-len(tokens) // SIZE)
        if need > min(self.cache.num_free_blocks(), self._room()):
            return
        before = dict(self.cache.kept.marks)
        free = (block for block in self.cache.blocks if not block.ref_count)
        unkept = sum(block.hash not in before for block in free)
        table = list(self.cache.allocate(tokens, prefix=prefix).block_ids)
        gone = before.keys() - self.cache.kept.marks.keys()
        if type(self).layout == UNIFORM and need <= unkept:
            assert not gone, "a kept block was taken while another one was free"
        self.cache.publish(table, tokens, prefix, range(len(tokens) // SIZE))
        self.cache.slide(table, 0, len(tokens))
        self.live.append((tokens, prefix, table))

    @precondition(lambda self: self.live)
    @rule(
        pick=st.integers(0, 99),
        keep=st.booleans(),
        seconds=st.integers(1, 20),
        priority=st.integers(-1, 2),
    )
    def end(self, pick: int, keep: bool, seconds: int, priority: int) -> None:
        tokens, prefix, table = self.live.pop(pick % len(self.live))
        if keep:
            self.cache.keep(prefix, 0, seconds, priority)
            block_ids = self.cache.find(prefix.hashes).block_ids
            marks = [self.cache.kept.marks.get(self.cache.blocks[at].hash) for at in block_ids]
            kept = [mark for mark in marks if mark is not None]
            assert all(mark.until >= self.now + seconds for mark in kept)
            assert all(mark.priority >= priority for mark in kept)
            if len(self.cache.kept.marks) < self.cache.kept.most:
                assert len(kept) == len(block_ids), "a block was not kept, and there was room"
        self.cache.deallocate(table, self._num_slid(tokens))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99), start=st.integers(0, 8))
    def let_go(self, pick: int, start: int) -> None:
        _, prefix, _ = self.live[pick % len(self.live)]
        before = dict(self.cache.kept.marks)
        count = self.cache.let_go(prefix, start)
        gone = before.keys() - self.cache.kept.marks.keys()
        assert len(gone) == count
        assert gone <= set(prefix.hashes[-(-start // SIZE) :])

    @rule(seconds=st.integers(1, 9))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.cache.expire_kept()
        assert all(mark.until > self.now for mark in self.cache.kept.marks.values())

    @rule()
    def update(self) -> None:
        self.cache.drop_version("policy", self.version)
        self.version += 1
        assert not self.cache.kept.marks
        assert not self.evicted.blocks

    @invariant()
    def all_is_consistent(self) -> None:
        tables = [table for _, _, table in self.live]
        self.cache.check(tables, [self._num_slid(tokens) for tokens, _, _ in self.live])
        for block in self.evicted.blocks:
            assert len(block.token_ids) == SIZE

    def _num_slid(self, tokens: list[int]) -> int:
        return self.cache.layout.num_slid(len(tokens), SIZE)

    def _room(self) -> int:
        return self.cache.num_free_units() // self.cache.layout.num_units


@pytest.mark.parametrize("layout", [UNIFORM, WINDOW])
@pytest.mark.parametrize("cache_type", CACHES)
def test_marks_are_consistent_after_any_history(
    cache_type: type[KVCacheManager], layout: BlockLayout
) -> None:
    machine = type("Machine", (KeptMachine,), {"cache_type": cache_type, "layout": layout})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=at_depth(100), stateful_step_count=40, deadline=None),
    )


class Case:
    """A cache of 12 blocks with kept prefixes and competing requests."""

    def __init__(
        self,
        cache_type: type[KVCacheManager],
        layout: BlockLayout = UNIFORM,
        num_blocks: int = 12,
    ) -> None:
        self.evicted, self.now = Evicted(), 0.0
        self.cache = cache_type(num_blocks, SIZE, layout=layout, evicted=lambda: self.evicted)
        self.cache.kept.clock = lambda: self.now

    def run(self, stem: int, blocks: int, keep: tuple[float, int] | None = None) -> list[int]:
        tokens = [stem * 100 + place for place in range(blocks * SIZE)]
        prefix = keys(tokens)
        table = list(self.cache.allocate(tokens, prefix=prefix).block_ids)
        self.cache.publish(table, tokens, prefix, range(blocks))
        if keep is not None:
            self.cache.keep(prefix, len(tokens), *keep)
        self.cache.deallocate(table)
        self.cache.check([])
        return tokens

    def hits(self, tokens: list[int]) -> int:
        return len(self.cache.match(tokens, keys(tokens), len(tokens)).block_ids)


@pytest.mark.parametrize("layout", [UNIFORM, WINDOW])
@pytest.mark.parametrize("cache_type", CACHES)
def test_kept_prefix_hits_after_pressure_that_evicts_others(
    cache_type: type[KVCacheManager], layout: BlockLayout
) -> None:
    case = Case(cache_type, layout)
    kept, other = case.run(1, 4, keep=(60, 0)), case.run(2, 4)
    for stem in range(3, 20):
        case.run(stem, 4)
    assert case.hits(kept) == 4
    assert case.hits(other) == 0


@pytest.mark.parametrize("cache_type", CACHES)
def test_eviction_orders_by_priority_then_expiry(
    cache_type: type[KVCacheManager],
) -> None:
    case = Case(cache_type)
    late, high, soon = (
        case.run(s, 2, keep=k) for s, k in [(1, (90, 0)), (2, (5, 1)), (3, (50, 0))]
    )
    case.run(4, 8)
    assert [case.hits(each) for each in (late, high, soon)] == [2, 2, 0]
    assert [block.token_ids for block in case.evicted.blocks] == [(302, 303), (300, 301)]
    case.run(5, 10)
    assert [case.hits(each) for each in (late, high, soon)] == [0, 2, 0]
    case.run(6, 12)
    assert case.hits(high) == 0


@pytest.mark.parametrize("cache_type", CACHES)
def test_expired_blocks_are_evicted_normally(cache_type: type[KVCacheManager]) -> None:
    case = Case(cache_type)
    kept = case.run(1, 4, keep=(10, 5))
    case.now = 9.9
    case.cache.expire_kept()
    case.run(2, 8)
    case.run(3, 8)
    assert case.hits(kept) == 4
    case.now = 10.0
    case.cache.expire_kept()
    case.run(4, 4)
    case.run(5, 8)
    assert case.hits(kept) == 0
    assert not case.evicted.blocks


@pytest.mark.parametrize("cache_type", CACHES)
def test_kept_blocks_are_capped_at_half_the_pool(cache_type: type[KVCacheManager]) -> None:
    case = Case(cache_type)
    head = case.run(1, 10, keep=(60, 0))
    assert len(case.cache.kept.marks) == 6
    case.run(2, 6)
    case.run(3, 6)
    assert case.hits(head) == 6, "the head of the chain must be kept"
    high = case.run(4, 6, keep=(30, 1))
    case.run(5, 6)
    case.run(6, 6)
    assert [case.hits(head), case.hits(high)] == [0, 6]


@pytest.mark.parametrize("layout", [UNIFORM, WINDOW])
@pytest.mark.parametrize("cache_type", CACHES)
def test_kept_blocks_survive_if_they_can_be_restored(
    cache_type: type[KVCacheManager], layout: BlockLayout
) -> None:
    """Every block of consecutively kept conversations is either in memory or offloaded."""
    case = Case(cache_type, layout, num_blocks=100)
    hits = [case.run(stem, 20, keep=(60, 0)) for stem in range(20)]
    handed = {block.name for block in case.evicted.blocks}
    for tokens in hits:
        names = keys(tokens).hashes
        here = case.cache.count(names)
        assert handed.issuperset(names[here:])
    assert len(case.cache.kept.marks) == 50
    assert len(handed) == 350


@pytest.mark.parametrize("end", ["time", "flush", "flush, held"])
@pytest.mark.parametrize("cache_type", CACHES)
def test_kept_block_is_skipped_once(
    cache_type: type[KVCacheManager], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Each kept block is inspected once, however many there are, until its time is over."""
    now = 0.0
    num_units, tokens = 700, [place % 97 for place in range(200 * SIZE)]
    evicted, prefix = Evicted(), keys(tokens)
    cache = cache_type(600, SIZE, layout=WINDOW, num_units=num_units, evicted=lambda: evicted)
    cache.kept.clock = lambda: now
    asked, ask = list[int](), cache._is_kept_whole  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        cache, "_is_kept_whole", lambda block: (asked.append(block.block_id), ask(block))[1]
    )

    def run(tokens: list[int], prefix: PrefixKeys, seconds: float = 0.0) -> None:
        table = list[int]()
        for end in range(SIZE, len(tokens) + 1, SIZE):
            cache.extend(table, end - SIZE, end)
            cache.publish(table, tokens, prefix, range(end // SIZE - 1, end // SIZE))
            cache.slide(table, end - SIZE, end)
        if seconds:
            cache.keep(prefix, 0, seconds, 0)
        cache.deallocate(table, WINDOW.num_slid(len(tokens), SIZE))

    run(tokens, prefix, 60)
    for stem in range(1, 21):
        other = [stem * 1000 + place for place in range(150 * SIZE)]
        run(other, keys(other))
    assert cache.count(prefix.hashes) == 200
    assert len(asked) < 20 * 150 + 2 * 200
    cache.check([])
    slid = WINDOW.num_slid(len(tokens), SIZE)
    tables = [list(cache.find(prefix.hashes).block_ids)] if end == "flush, held" else []
    for table in tables:
        cache.adopt(table, slid)
    if end == "time":
        now = 60.0
        cache.expire_kept()
    else:
        cache.flush()
    cache.check(tables, [slid] * len(tables))
    other = [99 + place for place in range(400 * SIZE)]
    run(other, keys(other))
    assert cache.count(prefix.hashes) == 0
    cache.check(tables, [slid] * len(tables))


@pytest.mark.parametrize("cache_type", CACHES)
def test_blocks_of_an_old_adapter_are_not_kept(cache_type: type[KVCacheManager]) -> None:
    case = Case(cache_type)
    tokens = [*range(8)]
    prefix = keys(tokens, adapter="a@1")
    table = list(case.cache.allocate(tokens, prefix=prefix).block_ids)
    case.cache.publish(table, tokens, prefix, range(4))
    case.cache.keep(prefix, 8, 60, 0)
    case.cache.deallocate(table)
    case.cache.let_go_adapter("a@2")
    assert len(case.cache.kept.marks) == 4
    case.cache.let_go_adapter("a@1")
    assert not case.cache.kept.marks
    case.cache.check([])


def test_marks_stay_bounded_and_ordered() -> None:
    r, case = random.Random(5), Case(PagedKVCache)
    for step in range(2000):
        case.now = step / 7
        case.cache.expire_kept()
        case.run(r.randrange(40), r.randrange(1, 6), (r.randrange(1, 9), r.randrange(3)))
    queues = (case.cache.kept._all, case.cache.kept._free, case.cache.kept._ends)  # pyright: ignore
    assert all(len(queue._heap) <= 200 for queue in queues)  # pyright: ignore
    assert Mark(1, 2.0, 0, False) > Mark(1, 2.0, -1, True)


@pytest.mark.parametrize("cache_type", CACHES)
def test_let_go_spares_what_another_chain_continues(cache_type: type[KVCacheManager]) -> None:
    case = Case(cache_type, num_blocks=24)
    stem = [7] * (4 * SIZE)
    branches = [[*stem, *[number] * (2 * SIZE)] for number in (1, 2)]
    for tokens in branches:
        table = list(case.cache.allocate(tokens, prefix=keys(tokens)).block_ids)
        case.cache.publish(table, tokens, keys(tokens), range(6))
        case.cache.keep(keys(tokens), 0, 60, 0)
        case.cache.deallocate(table)
    assert len(case.cache.kept.marks) == 8
    assert case.cache.let_go(keys(branches[0]), 0) == 2
    assert case.cache.let_go(keys(branches[1]), 2 * SIZE) == 4
    assert set(case.cache.kept.marks) == set(keys(stem).hashes[:2])
    case.cache.check([])
