"""Extreme request parameters are either rejected by name or sampled to the end."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nano_inference import EngineConfig, InferenceEngine, InvalidRequest, SamplingParams
from tests.depth import at_depth
from tests.models.tiny import tiny_llama

TINY = [5e-324, 1e-320, 1e-300, 1e-45, 1e-40, 1e-38, 1e-30, 1e-7, 0.01]
HUGE = [
    100.0,
    1e7,
    1e30,
    3.4e38,
    1e39,
    1e300,
    1.7e308,
    10**18,
    10**40,
    10**300,
    10**400,
    2**63 - 1,
    2**63,
    2**64,
]
ENDS = [0, 0.0, -0.0, 1, 1.0, math.nextafter(1, 0), math.nextafter(1, 2), *TINY, *HUGE]
SIGNED = [*ENDS, *(-end for end in ENDS)]
NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_k",
]
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from(SIGNED) for name in NUMBERS},
        "logit_bias": st.dictionaries(
            st.sampled_from([0, 5, 299, 300, 2**63]), st.sampled_from(SIGNED), max_size=3
        ),
        "allowed_token_ids": st.sampled_from([[7], [5, 6, 299], range(300)]),
        "min_tokens": st.sampled_from([0, 3, 2**62, 10**400]),
        "seed": st.sampled_from([0, 2**64 - 1, 2**64]),
    },
)


@pytest.fixture(scope="module", params=["cpu", "reference"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InferenceEngine]:
    folder = tiny_llama(tmp_path_factory.mktemp("model"), std=1.0)
    config = EngineConfig(
        model_path=str(folder),
        backend=request.param,
        device="cpu",
        dtype="float32",
        kv_cache_memory=2**22,
    )
    with InferenceEngine(config) as built:
        yield built


@settings(deadline=None, max_examples=at_depth(60))
@given(options=OPTIONS)
@example({"repetition_penalty": 1e-40})
@example({"temperature": 10**400})
@example({"temperature": 1e-45, "allowed_token_ids": [7]})
@example(
    {"temperature": 5e-324, "repetition_penalty": 0.01, "logit_bias": {5: -100.0}, "min_p": 1e-300}
)
@example({"temperature": 1.7e308, "repetition_penalty": 100.0, "top_p": 5e-324, "top_k": 2**63 - 1})
def test_extreme_params_are_rejected_or_sampled(
    engine: InferenceEngine, options: dict[str, Any]
) -> None:
    try:
        params = SamplingParams(
            max_tokens=3, ignore_eos=True, top_logprobs=2, raw_logprobs=True, **options
        )
        (sample,) = engine.generate([1, 5, 7], params)
    except InvalidRequest:
        return
    assert len(sample.completion_tokens) == 3
    for column in (sample.logprobs, sample.raw_logprobs, sample.log_kept_mass):
        assert column is not None
        assert all(math.isfinite(each) and each <= 1e-6 for each in column)
    assert not any(math.isnan(each) for top in sample.top_logprobs or () for each in top.logprobs)
