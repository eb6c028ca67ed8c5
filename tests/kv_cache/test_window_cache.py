"""Caches of models with sliding-window layers: random histories and guarantees to callers."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from nano_inference import PagedKVCache, RadixKVCache
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.kv_cache.sliding_window import BlockLayout
from tests.depth import at_depth
from tests.kv_cache.window_machine import LAYOUTS, WindowCacheFactory, WindowMachine


class PagedWindowMachine(WindowMachine):
    factory = PagedKVCache


class RadixWindowMachine(WindowMachine):
    factory = RadixKVCache


@pytest.mark.parametrize("machine", [PagedWindowMachine, RadixWindowMachine])
def test_window_cache_is_consistent_after_any_history(machine: type[WindowMachine]) -> None:
    few = settings(
        max_examples=at_depth(200),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(machine, settings=few)


@given(layout=LAYOUTS, size=st.integers(1, 5), start=st.integers(0, 60), length=st.integers(1, 20))
def test_chunk_needs_at_most_the_blocks_of_the_layout(
    layout: BlockLayout, size: int, start: int, length: int
) -> None:
    blocks = -(-(start + length) // size)
    slid = layout.num_slid(start, size)
    assert all((block + 1) * size - 1 <= start - layout.window for block in range(slid)), (
        "a block was let go too early"
    )
    assert slid == blocks or (slid + 1) * size - 1 > start - layout.window, (
        "a block was kept too long"
    )
    units = layout.num_full * blocks + layout.num_sliding * (blocks - slid)
    assert units <= layout.most_units(start + length, length, size)
    assert blocks - slid <= layout.most_in_window(length, size)


@pytest.fixture(params=[PagedKVCache, RadixKVCache])
def factory(request: pytest.FixtureRequest) -> WindowCacheFactory:
    return request.param


def run_alone(cache: KVCacheManager, tokens: list[int]) -> list[int]:
    """Compute a sequence token by token. Return its table."""
    prefix = PrefixKeys(Namespace())
    prefix.extend(tokens, cache.block_size)
    table: list[int] = []
    for start in range(len(tokens)):
        cache.extend(table, start, start + 1)
        full = (start + 1) // cache.block_size
        cache.publish(table, tokens, prefix, range(start // cache.block_size, full))
        cache.slide(table, start, start + 1)
    return table


def matched(cache: KVCacheManager, tokens: list[int]) -> int:
    prefix = PrefixKeys(Namespace())
    prefix.extend(tokens, cache.block_size)
    return cache.match(tokens, prefix, len(tokens)).cached_length


def test_long_sequence_needs_memory_only_for_its_window(factory: WindowCacheFactory) -> None:
    cache = factory(100, 2, layout=BlockLayout(0, 1, 4), num_units=3)
    table = run_alone(cache, list(range(100)))
    assert len(table) == 50
    assert cache.num_units - cache.num_free_units() == 2
    hybrid = factory(60, 2, layout=BlockLayout(1, 5, 4), num_units=50 + 3 * 5)
    run_alone(hybrid, list(range(100)))
    assert hybrid.num_units - hybrid.num_free_units() == 50 + 2 * 5


def test_blocks_outside_the_window_match_until_reused(factory: WindowCacheFactory) -> None:
    cache = factory(40, 2, layout=BlockLayout(1, 2, 4), num_units=45)
    stem, first = list(range(20)), [100, 101, 102, 103]
    table = run_alone(cache, stem + first * 3)
    assert matched(cache, [*stem, 7]) == 20, "no unit was reused after the window moved"
    cache.deallocate(table, cache.layout.num_slid(32, 2))
    run_alone(cache, list(range(200, 220)))  # takes released units first, before any whole block
    assert matched(cache, stem + first * 3) == 32, "the end of a finished sequence is kept longest"
    assert matched(cache, stem[:6]) == 0


def test_recomputed_prefix_matches_again(
    factory: WindowCacheFactory,
) -> None:
    cache = factory(40, 2, layout=BlockLayout(1, 2, 4), num_units=40)
    stem = list(range(12))
    first = run_alone(cache, stem + [50] * 20)
    second = run_alone(cache, [60] * 8)  # takes the units that the stem released
    assert matched(cache, stem) == 0
    cache.deallocate(second, cache.layout.num_slid(8, 2))
    again = run_alone(cache, stem)
    assert matched(cache, stem) == 12
    cache.deallocate(first, cache.layout.num_slid(32, 2))
    cache.deallocate(again, cache.layout.num_slid(12, 2))
    cache.check([], [])
    assert matched(cache, stem) == 12


def test_invalid_layout_is_rejected() -> None:
    for counts in [(0, 0, 0), (1, 1, 0), (1, 0, 4), (-1, 2, 4)]:
        with pytest.raises(ValueError, match="is invalid"):
            BlockLayout(*counts)
