"""The cost of a request grows with every parameter, and the size suggested by a rejection fits."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.config import DEFAULT_ENTRIES
from nano_inference.core.budget import Demand, demand_of, most_mask_ids, require_affordable
from nano_inference.errors import RequestTooLarge
from nano_inference.types import SamplingParams

small = st.integers(0, 40)
demands = st.builds(
    Demand,
    prompt=st.integers(1, 40_000),
    num_samples=st.integers(1, 300),
    max_tokens=st.integers(1, 40_000),
    top_logprobs=small,
    prompt_top_logprobs=small,
    numbers=st.integers(1, 4),
    parameters=st.integers(0, 200_000),
    scores_prompt=st.booleans(),
    counts_prompt=st.booleans(),
    repeats_prompt=st.booleans(),
    routed=st.integers(0, 40),
    named=small,
    prompt_named=small,
    raw=st.booleans(),
)
NAMES = {field: field for field in Demand._fields}


@given(demands, st.sampled_from(Demand._fields), st.integers(1, 10))
def test_cost_grows_with_every_number(demand: Demand, field: str, more: int) -> None:
    value = getattr(demand, field)
    larger = demand._replace(**{field: True if isinstance(value, bool) else value + more})
    assert larger.entries() >= demand.entries()


@given(demands, st.integers(1, 50_000_000))
def test_suggested_size_fits_and_one_more_does_not(demand: Demand, budget: int) -> None:
    try:
        assert require_affordable(demand, budget, NAMES) == demand.entries() <= budget
        return
    except RequestTooLarge as problem:
        message = str(problem)
    assert demand.entries() > budget
    assert f"max_request_entries={budget}" in message
    changes = {
        name: (int(old), int(new))
        for name, old, new in re.findall(r"(\w+) from (\d+) to (\d+)", message)
    }
    least = Demand(
        prompt=1,
        num_samples=1,
        max_tokens=1,
        numbers=demand.numbers,
        routed=demand.routed,
        scores_prompt=demand.scores_prompt,
    )
    if not changes:
        assert message.endswith("; raise max_request_entries.")
        assert least._replace(counts_prompt=demand.counts_prompt).entries() > budget
        return
    assert all(getattr(demand, field) == old > new for field, (old, new) in changes.items())
    lowered = demand._replace(**{field: new for field, (_, new) in changes.items()})
    assert lowered.entries() <= budget
    last, (_, value) = list(changes.items())[-1]
    assert lowered._replace(**{last: value + 1}).entries() > budget
    if len(changes) > 1:
        tightest = {
            "num_samples": 1,
            "max_tokens": 1,
            "prompt": 1,
            "top_logprobs": 0,
            "prompt_top_logprobs": 0,
            "named": 0,
            "prompt_named": 0,
        }
        assert all(
            demand._replace(**{field: least}).entries() > budget
            for field, least in tightest.items()
        )


@given(demands, st.integers(1, 50_000_000))
def test_full_masks_do_not_exceed_the_budget(demand: Demand, budget: int) -> None:
    if demand.entries() <= budget:
        ids = most_mask_ids(demand, budget)
        assert ids >= demand.max_tokens
        assert demand.entries() + demand.num_samples * (ids - demand.max_tokens) <= budget


@pytest.mark.parametrize(
    ("prompt", "n", "params"),
    [
        (2048, 128, {"max_tokens": 4096, "raw_logprobs": True, "prompt_logprobs": True}),
        (
            1024,
            16,
            {"max_tokens": 8192, "raw_logprobs": True, "top_logprobs": 20, "prompt_logprobs": True},
        ),
        (
            512,
            64,
            {"max_tokens": 4096, "top_p": 0.9, "sampling_mask": True, "repetition_penalty": 1.1},
        ),
        (32_768, 16, {"max_tokens": 4096, "prompt_logprobs": True}),
        (100, 128, {"max_tokens": 32_768}),
        (131_072, 1, {"max_tokens": 1, "prompt_logprobs": True, "prompt_top_logprobs": 20}),
        (512, 16, {"max_tokens": 2048, "allowed_token_ids": range(10_000)}),
    ],
)
def test_budget_allows_typical_training_requests(prompt: int, n: int, params: dict) -> None:
    assert require_affordable(
        demand_of(prompt, SamplingParams(**params), n, repeats_prompt=True), DEFAULT_ENTRIES
    )


@pytest.mark.parametrize(
    ("prompt", "n", "params", "message"),
    [
        (
            2000,
            128,
            {"prompt_logprobs": True, "prompt_top_logprobs": 20},
            "lower prompt_top_logprobs from 20 to 17",
        ),
        (1, 256, {"allowed_token_ids": range(100_000)}, "lower num_samples from 256 to 49"),
        (1, 128, {"max_tokens": 100_000}, "lower max_tokens from 100000 to 39061"),
        (50_000, 128, {"repetition_penalty": 1.1}, "lower num_samples from 128 to 49"),
        (1, 128, {"stop": ["x" * 100_000]}, "lower num_samples from 128 to 49"),
    ],
)
def test_budget_rejects_requests_that_exhaust_memory(
    prompt: int, n: int, params: dict, message: str
) -> None:
    demand = demand_of(prompt, SamplingParams(**params), n, repeats_prompt=True)
    with pytest.raises(RequestTooLarge, match=message):
        require_affordable(demand, DEFAULT_ENTRIES)


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids", "logit_bias", "stop"])
def test_budget_counts_every_parameter(field: str) -> None:
    value = {"logit_bias": dict.fromkeys(range(100), 1.0), "stop": ["ab"] * 50}.get(
        field, range(100)
    )
    plain, more = (
        demand_of(1, SamplingParams(), 3),
        demand_of(1, SamplingParams(**{field: value}), 3),
    )
    assert more.entries() - plain.entries() == 300
