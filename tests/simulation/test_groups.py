"""Groups in the loop: later groups do not delay the oldest, and each group runs in turn."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.config import CacheType, SchedulerConfig
from tests.depth import at_depth
from tests.simulation.workload import Ask, Workload, run

CACHES = st.sampled_from(("paged", "radix"))
ASKS = st.builds(
    Ask,
    prompt=st.lists(st.integers(1, 10), min_size=1, max_size=2),
    max_tokens=st.integers(4, 14),
    num_samples=st.integers(1, 8),
    arrives=st.integers(0, 5),
)


def ends(workload: Workload) -> dict[int, int]:
    """Return for each request the step in which its last sample ended."""
    end_of: dict[int, int] = {}
    run(workload, on_sample=lambda sample, step: end_of.__setitem__(sample.request_id, step))
    return end_of


@pytest.mark.thorough
@settings(max_examples=at_depth(60), deadline=None)
@given(
    first=ASKS,
    others=st.lists(ASKS, min_size=1, max_size=5),
    tokens=st.integers(2, 8),
    blocks=st.integers(16, 60),
    cache_type=CACHES,
    lookahead=st.integers(0, 1),
    wanted=st.booleans(),
)
def test_oldest_group_is_not_delayed_by_others(
    first: Ask,
    others: list[Ask],
    tokens: int,
    blocks: int,
    cache_type: CacheType,
    lookahead: int,
    wanted: bool,
) -> None:
    config = SchedulerConfig(max_tokens_per_batch=tokens, block_size=2, enable_prefix_caching=False)
    first = replace(first, arrives=0, num_wanted=1 if wanted else None)
    alone = Workload([first], config, blocks, lookahead, cache_type=cache_type)
    assert ends(replace(alone, asks=[first, *others]))[0] == ends(alone)[0]


def test_groups_run_in_turn_under_memory_shortage() -> None:
    """Groups must not all end at the very end."""
    config = SchedulerConfig(max_tokens_per_batch=8, block_size=4)
    asks = [Ask([1 + place], 12, num_samples=8, arrives=place) for place in range(4)]
    end_of = ends(Workload(asks, config, num_blocks=200, lookahead=0))
    order = [end_of[place] for place in range(4)]
    assert order == sorted(order)
    assert order[0] < order[-1] / 2


def test_turns_of_a_session_precede_newer_groups() -> None:
    """The second turn of a group's rollouts must not wait behind all groups that came since."""
    config = SchedulerConfig(max_batch_size=4, block_size=4)
    groups = [Ask([1 + number], 8, num_samples=2, arrives=0) for number in range(8)]
    turns = [Ask([1, number], 8, num_samples=1, arrives=12) for number in range(2)]
    placed = [replace(ask, turn_of=0) for ask in turns]
    late = ends(Workload([*groups, *turns], config, num_blocks=200, lookahead=0))
    soon = ends(Workload([*groups, *placed], config, num_blocks=200, lookahead=0))
    unbegun = [5, 6, 7]  # groups that wait when the turns arrive
    assert max(soon[8], soon[9]) < min(soon[number] for number in unbegun)
    assert max(late[8], late[9]) > min(late[number] for number in unbegun)
