"""The benchmark of replicas, as far as it needs no engine."""

import json

import pytest

from benchmarks.replicas import Shape, asked, router_row


@pytest.mark.parametrize("just_read", [False, True])
def test_the_routers_time_is_a_row(just_read: bool) -> None:
    row = router_row(300, 5, 2, just_read, requests=40)
    assert row["us"]["median"] > 0
    assert row["prompt_tokens"] == 300
    json.dumps(row)


def test_prompts_have_nothing_in_common_and_are_the_same_each_time() -> None:
    work = asked(Shape(4, 8, 16), 1, 100)
    assert work == asked(Shape(4, 8, 16), 1, 100)
    assert len({tuple(prompt) for prompt, _ in work}) == 4
    assert [params.seed for _, params in work] == [0, 1, 2, 3]
