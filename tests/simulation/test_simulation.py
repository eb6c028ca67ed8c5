"""The real loop on a fake model: random workloads, and every small one."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nano_inference.config import CacheType, SchedulerConfig
from nano_inference.kv_cache.caches import CACHES
from nano_inference.kv_cache.sliding_window import BlockLayout
from tests.depth import at_depth, share_of
from tests.simulation.workload import (
    Ask,
    FakeDrafts,
    Workload,
    random_workload,
    run,
    with_drafts,
    with_groups,
)


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("block", range(10))
def test_random_workloads_end_correctly(block: int, cache_type: CacheType) -> None:
    first = 100_000 + block * 30
    workloads = [random_workload(seed) for seed in range(first, first + at_depth(30))]
    outcomes = [run(replace(workload, cache_type=cache_type)) for workload in workloads]
    assert sum(outcome.steps for outcome in outcomes) > 0


@pytest.mark.parametrize("cache_type", CACHES)
def test_random_workloads_reach_the_hard_cases(cache_type: CacheType) -> None:
    workloads = [
        replace(random_workload(seed), cache_type=cache_type) for seed in range(200_000, 200_060)
    ]
    outcomes = [run(workload) for workload in workloads]
    assert sum(outcome.preemptions for outcome in outcomes) > 20
    assert sum(outcome.tokens_cached for outcome in outcomes) > 100
    assert sum(outcome.aborted for outcome in outcomes) > 0
    assert sum(outcome.updates for outcome in outcomes) > 5
    assert sum(outcome.mixed for outcome in outcomes) > 5
    assert sum(outcome.previous for outcome in outcomes) > 3
    assert sum(outcome.stragglers for outcome in outcomes) > 20
    assert sum(outcome.belated for outcome in outcomes) > 1
    both = zip(workloads, outcomes, strict=True)
    sliding = [pair for pair in both if pair[0].layout.num_sliding]
    windowed, outcomes = [each for each, _ in sliding], [each for _, each in sliding]
    assert sum(workload.layout.num_full > 0 for workload in windowed) > 5
    assert sum(workload.layout.num_full == 0 for workload in windowed) > 5
    assert sum(outcome.preemptions for outcome in outcomes) > 10
    assert sum(outcome.tokens_cached for outcome in outcomes) > 50


@pytest.mark.parametrize("kind", FakeDrafts.KINDS)
def test_drafts_change_no_token(kind: str) -> None:
    """Every check of the fake model passes, and every token equals its oracle."""
    count = at_depth(40)
    outcomes = [
        run(with_drafts(random_workload(seed), kind, most=1 + seed % 5))
        for seed in range(300_000, 300_000 + count)
    ]
    drafted = sum(outcome.drafted for outcome in outcomes)
    accepted = sum(outcome.accepted for outcome in outcomes)
    assert drafted > 5 * count
    assert sum(outcome.preemptions for outcome in outcomes) > count // 4
    if kind == "right":
        assert accepted > 0.8 * drafted  # the remaining drafts came after an end or an update
    elif kind == "wrong":
        assert accepted == 0
    else:
        assert 0 < accepted < drafted


@pytest.mark.parametrize("kind", FakeDrafts.KINDS)
def test_drafts_change_no_token_of_a_pipeline(kind: str) -> None:
    for seed in range(310_000, 310_000 + at_depth(20)):
        run(with_drafts(with_groups(random_workload(seed), 2 + seed % 2), kind, 1 + seed % 5))


# (prompt tokens, max_tokens); at most 12 tokens fit
SHAPES = [(1, 2), (1, 5), (3, 4), (6, 1), (6, 6)]


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    ("tokens", "seqs", "chunk"), [(2, 3, None), (8, 3, None), (8, 2, 2), (8, 3, 3)]
)
def test_schedules_of_three_sequences_on_six_blocks_end(
    cache_type: CacheType, lookahead: int, tokens: int, seqs: int, chunk: int | None
) -> None:
    config = SchedulerConfig(
        max_batch_size=seqs, max_tokens_per_batch=tokens, block_size=2, max_chunk_tokens=chunk
    )
    for asks in share_of(three_asks(SHAPES, [(0, 0), (0, 1), (1, 1), (1, 3), (2, 5)])):
        run(Workload(asks, config, num_blocks=6, lookahead=lookahead, cache_type=cache_type))


def three_asks(
    shapes: list[tuple[int, int]], arrivals: list[tuple[int, int]]
) -> Iterator[list[Ask]]:
    """Yield three requests of every shape. The second and third arrive at every time, and share the
    stem of the first or not.
    """
    for three in itertools.product(shapes, repeat=3):
        for second, third in arrivals:
            for stems in ((1, 1, 1), (1, 2, 1)):
                yield [
                    Ask([stem] * length, most, arrives=arrives)
                    for (length, most), arrives, stem in zip(
                        three, (0, second, third), stems, strict=True
                    )
                ]


# A window of three tokens touches two blocks of two. Memory is exactly enough for 12 tokens.
TIGHT = [
    (BlockLayout(0, 1, 3), 18, 2),
    (BlockLayout(1, 2, 3), 10, 6 + 2 * 2),
    (BlockLayout(2, 1, 3), 7, 12 + 2),
]


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("tokens", "chunk"), [(8, None), (3, 2)])
@pytest.mark.parametrize(("layout", "num_blocks", "num_units"), TIGHT)
def test_schedules_of_three_sequences_in_tight_memory_end(
    cache_type: CacheType,
    lookahead: int,
    tokens: int,
    chunk: int | None,
    layout: BlockLayout,
    num_blocks: int,
    num_units: int,
) -> None:
    config = SchedulerConfig(max_tokens_per_batch=tokens, block_size=2, max_chunk_tokens=chunk)
    for asks in share_of(three_asks([(1, 5), (3, 4), (6, 6)], [(0, 0), (1, 1), (2, 5)])):
        run(
            Workload(
                asks,
                config,
                num_blocks,
                lookahead,
                {},
                cache_type,
                layout=layout,
                num_units=num_units,
            )
        )
