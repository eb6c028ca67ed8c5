"""The loop with one group of sequences per pipeline stage: random workloads, small workloads and
balance.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from nano_inference.config import CacheType, SchedulerConfig
from nano_inference.core.loop import Add, EngineLoop
from nano_inference.core.sequence import CheckedRequest, Sequence
from nano_inference.kv_cache.caches import CACHES
from nano_inference.kv_cache.hash_cache import PagedKVCache
from nano_inference.kv_cache.sliding_window import BlockLayout
from nano_inference.types import SamplingParams
from tests.simulation.fake_model import FakeRunner
from tests.simulation.workload import Ask, Workload, random_workload, run, with_groups

GROUPS = [2, 4]


@pytest.mark.thorough
@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("groups", GROUPS)
def test_random_workloads_end_with_the_right_tokens(groups: int, cache_type: CacheType) -> None:
    drawn = [with_groups(random_workload(seed), groups) for seed in range(300_000, 300_012)]
    outcomes = [run(replace(workload, cache_type=cache_type)) for workload in drawn]
    assert sum(outcome.preemptions for outcome in outcomes) > 0
    assert sum(outcome.tokens_cached for outcome in outcomes) > 50
    assert sum(outcome.aborted for outcome in outcomes) > 0
    assert sum(outcome.updates for outcome in outcomes) > 3
    assert sum(outcome.previous for outcome in outcomes) > 0


@pytest.mark.slow
@pytest.mark.parametrize("groups", GROUPS)
def test_random_workloads_end_correctly_three_thousand_times(groups: int) -> None:
    for seed in range(3000):
        run(with_groups(random_workload(seed), groups))


SHAPES = [(1, 2), (1, 5), (6, 1), (6, 6)]  # (prompt tokens, max_tokens); at most 12 tokens fit
LAYOUTS: list[dict[str, Any]] = [
    {"num_blocks": 6},
    {"num_blocks": 10, "layout": BlockLayout(1, 2, 3), "num_units": 6 + 2 * 2},
]


LIMITS = [(8, 3, None), (2, 2, 2)]


def run_all_of_three(
    groups: int, limits: tuple[int, int, int | None], kv: dict[str, Any], every: int
) -> None:
    tokens, seqs, chunk = limits
    config = SchedulerConfig(
        max_batch_size=seqs,
        max_tokens_per_batch=tokens,
        block_size=2,
        max_chunk_tokens=chunk,
        groups=groups,
    )
    stems = ((1, 1, 1), (1, 2, 1))  # the prompts share a stem, or the second does not
    cases = itertools.product(itertools.product(SHAPES, repeat=3), [(0, 0), (0, 1), (1, 3)], stems)
    for shapes, (second, third), letters in itertools.islice(cases, 0, None, every):
        asks = [
            Ask([letter] * length, most, arrives=arrives)
            for (length, most), arrives, letter in zip(
                shapes, (0, second, third), letters, strict=True
            )
        ]
        run(Workload(asks, config, lookahead=groups - 1, **kv))


@pytest.mark.thorough
@pytest.mark.parametrize("groups", GROUPS)
def test_schedules_of_three_sequences_are_correct_when_sampled(groups: int) -> None:
    for index, (limits, kv, cache_type) in enumerate(itertools.product(LIMITS, LAYOUTS, CACHES)):
        run_all_of_three(groups, limits, {**kv, "cache_type": cache_type}, every=37 + 2 * index)


@pytest.mark.slow
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("kv", LAYOUTS)
@pytest.mark.parametrize("cache_type", CACHES)
def test_schedules_of_three_sequences_are_all_correct(
    groups: int, limits: tuple[int, int, int | None], kv: dict[str, Any], cache_type: CacheType
) -> None:
    run_all_of_three(groups, limits, {**kv, "cache_type": cache_type}, every=1)


def endless_loop(lengths: list[int], groups: int, **limits: int) -> EngineLoop:
    """Return a loop with prompts of these lengths and long samples that stop only by length."""
    config = SchedulerConfig(block_size=4, groups=groups, enable_prefix_caching=False, **limits)  # pyright: ignore
    loop = EngineLoop(PagedKVCache(400, 4), FakeRunner(1600, 4), config, groups - 1, "fake")
    for index, length in enumerate(lengths):
        params = SamplingParams(max_tokens=60)
        prompt = [1 + index % 9] * length
        loop.inbox.append(
            Add(Sequence(index, CheckedRequest(index, length, params, seed=index), prompt))
        )
    for _ in lengths:
        loop.sequences.new_id()
    return loop


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("num_seqs", [1, 2, 5, 8, 13])
def test_step_takes_its_share_of_the_prompt(num_seqs: int, groups: int) -> None:
    """New requests spread immediately. Later every sequence is in one of `groups` steps."""
    loop = endless_loop([3] * num_seqs, groups)
    sizes: list[int] = []
    for _ in range(8 * groups):
        loop.step()
        sizes += [len(loop.in_flight[-1].sampled)] if loop.in_flight else []
    if groups == 1:
        return  # no step stays in flight
    share = -(-num_seqs // groups)
    assert max(sizes) == share
    busy = min(groups, num_seqs)
    assert sizes[0] == share, "the first step takes no more, though all have come"
    tail = sizes[-busy:]
    assert sum(tail) == num_seqs, "in turn they take all"
    assert max(tail) - min(tail) <= 1


def test_long_prompt_is_in_every_step() -> None:
    """Chunks sample nothing, so they follow each other through the stages, next to decoding
    sequences.
    """
    loop = endless_loop([3, 3, 200], 2, max_chunk_tokens=10)
    chunks = []
    loop.step()  # two groups begin, of two and one; then of one each, next to the chunks
    loop.step()
    for _ in range(10):
        before = {seq.seq_id: seq.num_computed_tokens for seq in loop.sequences.running}
        loop.step()
        after = {seq.seq_id: seq.num_computed_tokens for seq in loop.sequences.running}
        chunks.append(after.get(2, 0) - before.get(2, 0))
        assert len(loop.in_flight[-1].sampled) == 1
    assert chunks == [10] * 10


def test_urgent_request_does_not_wait_for_balance() -> None:
    loop = endless_loop([3] * 4, 2, max_batch_size=4)
    for _ in range(4):
        loop.step()
    params = SamplingParams(max_tokens=3, priority=-1)
    loop.inbox.append(Add(Sequence(loop.sequences.new_id(), CheckedRequest(9, 2, params), [1, 2])))
    loop.step()
    assert any(seq.request_id == 9 for seq in loop.in_flight[-1].sampled)
