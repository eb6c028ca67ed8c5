"""Messages between the two processes arrive unchanged, bit for bit."""

import math
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.remote.messages import FromEngine, Generate, Heartbeat, Outputs, ToEngine
from nano_inference.types import (
    ContextVersions,
    Delta,
    EngineStats,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    SpeculationStats,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)
from tests.depth import at_depth

FLOATS = st.floats() | st.sampled_from([-0.0, math.nan, math.inf, -math.inf])
IDS = st.integers(0, 2**31)
SEEDS = st.integers(0, 2**64 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def tuples(each: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(each, max_size=3).map(tuple)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    max_tokens=st.integers(4, 100),
    stop_token_ids=st.frozensets(IDS, max_size=3),
    stop=tuples(TEXTS.filter(bool)),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100) | st.just(-0.0), max_size=3),
    allowed_token_ids=st.none(),
    min_tokens=st.integers(0, 4),
    seed=st.none() | SEEDS,
    prompt_logprobs=st.booleans(),
    cache_salt=st.none() | TEXTS,
    priority=st.integers(-(2**31), 2**31 - 1),
    keep_cache_seconds=st.floats(0.5, 86400),
    cache_priority=st.integers(-(2**31), 2**31 - 1),
) | st.builds(SamplingParams, allowed_token_ids=st.frozensets(IDS, min_size=1, max_size=3))
SPANS = st.builds(VersionSpan, IDS, IDS, IDS)
TOP = st.builds(TopLogprobs, tuples(IDS), tuples(FLOATS))
SAMPLES = st.builds(
    TrainingSample,
    tuples(IDS),
    tuples(IDS),
    tuples(FLOATS),
    st.none() | tuples(FLOATS),
    IDS,
    st.sampled_from(["stop", "length", "abort"]),
    stop_reason=st.none() | IDS | TEXTS,
    weight_versions=tuples(SPANS),
    sampling_mask=st.none() | st.builds(SamplingMask, tuples(IDS), tuples(IDS)),
    top_logprobs=st.none() | tuples(TOP),
    prompt_logprobs=st.none() | tuples(FLOATS),
    seed=SEEDS,
    text=st.none() | TEXTS,
    kv_versions=tuples(st.builds(ContextVersions, IDS, IDS, tuples(SPANS))),
    loss_mask=tuples(st.booleans()),
    sampling_params=st.none() | PARAMS,
    routed_experts=st.none()
    | st.binary(max_size=20).map(lambda data: RoutedExperts((1, len(data), 1), "uint8", data)),
    routed_experts_unknown=st.none() | TEXTS,
)
DELTAS = st.builds(
    Delta,
    IDS,
    IDS,
    tuples(IDS),
    tuples(FLOATS),
    st.none() | TEXTS,
    st.none() | SAMPLES,
    top_logprobs=st.none() | tuples(TOP),
    raw_logprobs=st.none() | tuples(FLOATS),
    cached_tokens=IDS,
    queued=st.floats(0, 100),
)


def there_and_back(message: Any, kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind).decode(msgspec.msgpack.Encoder().encode(message))


def plain(value: Any) -> str:
    """Return a value that is equal for equal bits: nan equals nan, -0.0 differs from 0.0."""
    return repr(msgspec.to_builtins(value, order="sorted"))


@given(st.lists(DELTAS, max_size=3))
@settings(max_examples=at_depth(80), deadline=None)
def test_deltas_arrive_as_they_were(deltas: list[Delta]) -> None:
    message = Outputs(deltas, list(range(len(deltas))))
    arrived = there_and_back(message, FromEngine)
    assert plain(arrived) == plain(message)
    for before, after in zip(deltas, arrived.deltas, strict=True):
        assert type(after) is Delta
        sample = after.finished
        if sample is not None:
            assert type(sample) is TrainingSample
            assert all(type(each) is TopLogprobs for each in sample.top_logprobs or ())
            assert all(type(each) is ContextVersions for each in sample.kv_versions)
            assert before.finished is not None
            # hash and comparison must agree too
            assert sample.sampling_params == before.finished.sampling_params


@given(st.lists(IDS), PARAMS)
@settings(max_examples=at_depth(80), deadline=None)
def test_requests_arrive_as_they_were(prompt: list[int], params: SamplingParams) -> None:
    arrived = there_and_back(Generate(3, prompt, params, 2, True), ToEngine)
    assert arrived == Generate(3, prompt, params, 2, True)
    assert plain(arrived.params) == plain(params)
    # rebuilding checks that every field kept its type
    assert replace(arrived.params) == params


def test_statistics_arrive_as_they_were() -> None:
    drafts = SpeculationStats(
        ("suffix",), {"suffix": (3, 1)}, {"suffix": (2, 0)}, (1, 2), (0.5, 0.6)
    )
    for speculation in (None, drafts):
        others: dict[str, Any] = {
            "step_microseconds": {"wait": 0.5},
            "ranks_busy": (1.5,),
            "ranks_waiting": (0.25,),
            "speculation": speculation,
        }
        stats = EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 1) | others)
        assert there_and_back(Heartbeat(stats, 7, True), FromEngine) == Heartbeat(stats, 7, True)
