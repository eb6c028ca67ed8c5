"""Workloads have the documented shapes and ids, and every variant has the same shapes."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import BASE, NAMES, Request, distinct_prompt_tokens, warm_up, workload
from tests.depth import at_depth

# name -> sequences, output tokens, prompt tokens, distinct prompt tokens, hash of all ids and
# lengths
STATED = {
    "W1": (1, 128, 128, 128, "eab42cc76eba5e66"),
    "W2": (64, 8192, 2048, 2048, "7221468a52ccd4e8"),
    "W3": (64, 8314, 21073, 21073, "e759095a1bb01b77"),
    "W4": (1, 1, 4096, 4096, "16dc75d0b9eb85b0"),
    "W5": (16, 512, 33792, 3072, "11e98e02310c4dca"),
    "W6": (64, 16090, 16384, 2048, "ce56b80c1db74488"),
}


@pytest.mark.parametrize("name", BASE)
def test_workloads_are_as_stated(name: str) -> None:
    load = workload(name)
    content = json.dumps(
        [(request.prompt, request.max_tokens, request.n) for request in load.requests]
    )
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    sizes = (
        load.num_sequences,
        load.output_tokens,
        load.prompt_tokens,
        distinct_prompt_tokens(load.requests),
    )
    assert (*sizes, digest) == STATED[name]


@pytest.mark.parametrize("name", NAMES)
def test_variant_has_the_same_shapes_and_shares_no_prefix(name: str) -> None:
    one, other = workload(name), workload(name, variant=3)
    assert [(len(r.prompt), r.max_tokens, r.n) for r in one.requests] == [
        (len(r.prompt), r.max_tokens, r.n) for r in other.requests
    ]
    alone = distinct_prompt_tokens(one.requests) + distinct_prompt_tokens(other.requests)
    assert distinct_prompt_tokens((*one.requests, *other.requests)) > 0.99 * alone
    assert one.sampling == other.sampling
    assert all(100 <= token < 49_000 for request in other.requests for token in request.prompt)


@pytest.mark.parametrize("name", NAMES)
def test_warm_up_has_the_same_prompts_and_short_answers(name: str) -> None:
    load, warm = workload(name), warm_up(name)
    assert [len(request.prompt) for request in warm.requests] == [
        len(request.prompt) for request in load.requests
    ]
    assert warm.num_sequences == load.num_sequences
    assert max(request.max_tokens for request in warm.requests) <= 32


def test_separate_requests_are_the_group_spelled_out() -> None:
    group, separate = workload("W2"), workload("W2-separate")
    assert separate.output_tokens == group.output_tokens
    assert [r.prompt for r in separate.requests] == [
        r.prompt for r in group.requests for _ in range(8)
    ]


def test_rollout_lengths_have_a_long_tail() -> None:
    lengths = sorted(request.max_tokens for request in workload("W6").requests)
    assert lengths[0] >= 16
    assert lengths[-1] == 1024
    assert sum(lengths) / len(lengths) > 1.4 * lengths[len(lengths) // 2]


@settings(max_examples=at_depth(50))
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=8)
)
def test_distinct_tokens_are_the_nodes_of_the_prompts_tree(prompts: list[tuple[int, ...]]) -> None:
    prefixes = {prompt[: length + 1] for prompt in prompts for length in range(len(prompt))}
    assert distinct_prompt_tokens([Request(prompt, 1) for prompt in prompts]) == len(prefixes)
