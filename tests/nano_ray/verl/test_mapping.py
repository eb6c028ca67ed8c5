"""Mapping between verl's terms and the engine's, without verl."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.errors import InvalidRequest
from nano_inference.types import (
    FinishReason,
    RoutedExperts,
    SamplingParams,
    TrainingSample,
    VersionSpan,
)
from nano_ray.verl.mapping import (
    GlobalSteps,
    RequestDefaults,
    refused_output,
    token_output,
    wanted,
)

DEFAULTS = RequestDefaults(prompt_length=20, response_length=30, max_model_len=100)
AGENT_LOOP = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}
SAMPLE = TrainingSample(
    prompt_tokens=(5, 6, 7),
    completion_tokens=(8, 9, 10),
    logprobs=(-0.1, -0.2, -0.3),
    ref_logprobs=None,
    weight_version=2,
    finish_reason="stop",
    raw_logprobs=(-1.0, -2.0, -3.0),
    weight_versions=(VersionSpan(1, 0, 2), VersionSpan(2, 2, 3)),
    cached_tokens=2,
)


def test_agent_loop_request_is_read() -> None:
    asked = wanted(AGENT_LOOP, 4, DEFAULTS)
    assert asked.params == SamplingParams(temperature=0.7, top_p=0.9, top_k=0, max_tokens=30)
    assert asked.log_probs
    assert asked.prompt_logprobs is None
    assert AGENT_LOOP["logprobs"] is True  # the caller's dict is unchanged


@given(
    told=st.one_of(st.none(), st.integers(-5, 200)), name=st.sampled_from(["max_tokens", "max_new_tokens"]),
    prompt=st.integers(1, 99),
)  # fmt: skip
def test_max_tokens_is_capped_by_the_context(told: int | None, name: str, prompt: int) -> None:
    params = wanted({} if told is None else {name: told}, prompt, DEFAULTS).params
    left = min(30, 50 - prompt) if told is None else told
    assert params.max_tokens == max(1, min(left, 100 - prompt))


def test_max_tokens_takes_precedence_over_max_new_tokens() -> None:
    assert wanted({"max_new_tokens": 3, "max_tokens": 7}, 1, DEFAULTS).params.max_tokens == 7


def test_rollout_config_sets_request_defaults() -> None:
    defaults = replace(
        DEFAULTS, repetition_penalty=1.2, ignore_eos=True, seed=43, raw_logprobs=True
    )
    params = wanted({"logprobs": True}, 1, defaults, priority=3).params
    assert params == SamplingParams(
        max_tokens=30,
        repetition_penalty=1.2,
        ignore_eos=True,
        seed=43,
        raw_logprobs=True,
        priority=3,
    )
    own = {"repetition_penalty": 1.0, "ignore_eos": False, "seed": 7, "logprobs": False}
    assert wanted(own, 1, defaults).params == SamplingParams(max_tokens=30, seed=7)


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"stop_regex": "x"}, "'stop_regex'"),
        ({"raw_logprobs": True}, "'raw_logprobs'"),
        ({"top_logprobs": 3}, "'top_logprobs'"),
        ({"n": 2}, "n=2"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_tokens": "7"}, "max_tokens='7'"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_unknown_parameter_is_named(told: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        wanted(told, 1, DEFAULTS)


def test_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 99"):
        wanted({}, 100, DEFAULTS)


def steps_of(**names: int) -> GlobalSteps:
    steps = GlobalSteps()
    for version, step in names.items():
        steps.name(int(version[1:]), step)
    return steps


def test_sample_as_a_token_output() -> None:
    output = token_output(SAMPLE, wanted({"logprobs": True}, 3, DEFAULTS), steps_of(v1=10, v2=11))
    assert output == {
        "token_ids": [8, 9, 10],
        "log_probs": [-0.1, -0.2, -0.3],
        "stop_reason": "completed",
        "extra_fields": {
            "global_steps": 11,
            "min_global_steps": 10,
            "max_global_steps": 11,
            "num_cached_tokens": 2,
        },
    }


def test_routed_experts_are_an_array_that_torch_takes() -> None:
    routed = RoutedExperts((5, 2, 1), "uint8", bytes(range(10)))
    asked = wanted({}, 3, replace(DEFAULTS, routed_experts=True))
    assert asked.params.routed_experts
    output = token_output(replace(SAMPLE, routed_experts=routed), asked, GlobalSteps())
    experts = torch.from_numpy(output["routed_experts"])
    assert (experts.shape, experts.dtype) == ((5, 2, 1), torch.int32)
    assert experts.flatten().tolist() == list(range(10))


@pytest.mark.parametrize(
    ("reason", "told"), [("stop", "completed"), ("length", "completed"), ("abort", "aborted")]
)
def test_stop_reasons(reason: FinishReason, told: str) -> None:
    sample = replace(SAMPLE, finish_reason=reason)
    assert token_output(sample, wanted({}, 3, DEFAULTS), GlobalSteps())["stop_reason"] == told


def test_log_probs_are_optional_and_raw_if_configured() -> None:
    raw = replace(DEFAULTS, raw_logprobs=True)
    assert token_output(SAMPLE, wanted({}, 3, DEFAULTS), GlobalSteps())["log_probs"] is None
    assert token_output(SAMPLE, wanted({"logprobs": True}, 3, raw), GlobalSteps())["log_probs"] == [
        -1.0,
        -2.0,
        -3.0,
    ]


def test_abort_before_the_first_token() -> None:
    sample = replace(
        SAMPLE, completion_tokens=(), logprobs=(), weight_versions=(), finish_reason="abort"
    )
    output = token_output(sample, wanted({"logprobs": True}, 3, DEFAULTS), steps_of(v2=11))
    assert (output["token_ids"], output["log_probs"], output["stop_reason"]) == ([], [], "aborted")
    assert (
        output["extra_fields"]["min_global_steps"] == output["extra_fields"]["global_steps"] == 11
    )


def test_request_that_was_turned_away() -> None:
    assert refused_output(4) == {
        "token_ids": [],
        "log_probs": None,
        "stop_reason": "aborted",
        "extra_fields": {"global_steps": 4},
    }


@given(st.lists(st.integers(0, 50), max_size=12))
def test_versions_rise_with_any_steps_and_map_to_them(told: list[int]) -> None:
    steps, newest, seen = GlobalSteps(), 0, {}
    for step in told:
        version = steps.version_for(step, newest)
        version = newest + 1 if version is None else version
        assert version > newest
        steps.name(version, step)
        seen[version], newest = step, version
    assert all(steps.of(version) == step for version, step in seen.items())
    assert steps.of(min(seen, default=0) - 1) is None
    assert steps.of(newest + 1) == (told[-1] if told else None)
    if told == sorted(set(told)) and 0 not in told:
        assert all(version == step for version, step in seen.items())
