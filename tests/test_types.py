import dataclasses
import math
from typing import Any

import pytest

from nano_inference import (
    InvalidRequest,
    NanoInferenceError,
    RequestTooLarge,
    SamplingParams,
    TrainingSample,
    VersionSpan,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "value", "would_do"),
    [
        *(("temperature", value, "at least 0") for value in (-0.1, NAN, INF, "1", None, True)),
        *(
            ("top_p", value, r"\(0, 1\]")
            for value in (0.0, 0, -0.1, 1.01, NAN, INF, "1", None, True)
        ),
        *(("min_p", value, r"\[0, 1\]") for value in (-0.1, 1.01, NAN, INF, "0", None, True)),
        *(("max_tokens", value, "at least 1") for value in (0, -1, 1.5, 16.0, "16", None, True)),
        *(("top_k", value, "at least 0") for value in (-1, 0.5, 5.0, "5", None, True)),
        *(("min_tokens", value, "at least 0") for value in (-1, 0.5, "5", None, True)),
        *(("presence_penalty", value, r"\[-2, 2\]") for value in (-2.1, 2.1, NAN, "1", None, True)),
        *(
            ("frequency_penalty", value, r"\[-2, 2\]")
            for value in (-2.1, 2.1, NAN, "1", None, True)
        ),
        *(
            ("repetition_penalty", value, r"\[0.01, 100\]")
            for value in (0.0, -1.0, 1e-40, 100.1, NAN, INF, "1", None, True)
        ),
        *(("top_logprobs", value, "at least 0") for value in (-1, 0.5, "5", None, True)),
        *(("prompt_top_logprobs", value, "at least 0") for value in (-1, 0.5, "5", None, True)),
        *(
            ("priority", value, r"\[-2147483648, 2147483648\)")
            for value in (-(2**31) - 1, 2**31, 0.5, None, True)
        ),
        *(("seed", value, r"\[0, 18446744073709551616\)") for value in (-1, 2**64, 1.0, "1", True)),
    ],
)
def test_number_out_of_range_error_names_the_range(name: str, value: Any, would_do: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}={value!r} must be .*{would_do}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name", ["temperature", "repetition_penalty", "max_tokens", "top_k", "top_logprobs", "seed"]
)
@pytest.mark.parametrize("digits", [400, 5000])
def test_integer_beyond_64_bits_is_rejected(name: str, digits: int) -> None:
    """Include an integer whose digits Python refuses to print."""
    value, message = 10**digits, rf"about 10\*\*{digits}"
    with pytest.raises(InvalidRequest, match=f"^{name}={message} must be"):
        SamplingParams(**{name: value})
    with pytest.raises(InvalidRequest, match=rf"^logit_bias\[3\]={message} must be"):
        SamplingParams(logit_bias={3: value})


@pytest.mark.parametrize("name", ["ignore_eos", "prompt_logprobs", "raw_logprobs", "sampling_mask"])
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_switches_are_booleans(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be True or False"):
        SamplingParams(**{name: value})


def test_prompt_top_logprobs_need_prompt_logprobs() -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt_top_logprobs=3 needs prompt_logprobs=True"):
        SamplingParams(prompt_top_logprobs=3)
    assert SamplingParams(prompt_top_logprobs=3, prompt_logprobs=True).prompt_top_logprobs == 3


@pytest.mark.parametrize("value", [3, b"salt", ["salt"], False])
def test_salt_is_a_string(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^cache_salt must be a string or None"):
        SamplingParams(cache_salt=value)
    assert SamplingParams(cache_salt="").cache_salt == ""


@pytest.mark.parametrize("value", [5, None, [1.5], ["2"], "2", [-1], [True], [[1]], [None]])
def test_stop_ids_are_a_set_of_ids(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        SamplingParams(stop_token_ids=value)


@pytest.mark.parametrize("value", [{3, 4}, [4, 3, 3], (3, 4), frozenset({3, 4}), iter([3, 4])])
def test_stop_ids_become_a_frozen_set(value: Any) -> None:
    assert SamplingParams(stop_token_ids=value).stop_token_ids == frozenset({3, 4})


@pytest.mark.parametrize("value", [5, None, {"a"}, [b"a"], [""], "", ["a", ""], ["a", 3], b"a"])
def test_stop_strings_must_be_non_empty(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^stop "):
        SamplingParams(stop=value)


@pytest.mark.parametrize(
    ("value", "kept"), [("a", ("a",)), (["a", "bc"], ("a", "bc")), (("a",), ("a",)), ([], ())]
)
def test_stop_strings_become_a_tuple(value: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=value).stop == kept


@pytest.mark.parametrize(
    "value", [5, None, [(1, 2.0)], {"1": 2.0}, {-1: 1.0}, {True: 1.0}, {1.5: 1.0}]
)
def test_bias_maps_ids(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias=value)


@pytest.mark.parametrize("value", [100.5, -101, NAN, INF, "1", None, True])
def test_bias_is_a_number_in_range(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias\[3\]=.*\[-100, 100\]"):
        SamplingParams(logit_bias={3: value})


def test_bias_is_copied() -> None:
    bias = {3: 1}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2
    assert params.logit_bias == {3: 1.0}


@pytest.mark.parametrize("value", [5, [1.5], ["2"], [-1], [True], [None]])
def test_allowed_ids_are_a_set_of_ids(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=value)


def test_allowed_ids_must_leave_a_token_to_sample() -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids is empty"):
        SamplingParams(allowed_token_ids=[])
    with pytest.raises(InvalidRequest, match="stop token id 9 is not among allowed_token_ids"):
        SamplingParams(allowed_token_ids=[1, 2], stop_token_ids=[1, 9])
    with pytest.raises(
        InvalidRequest, match=r"every one of the 2 allowed_token_ids stops.*min_tokens=1"
    ):
        SamplingParams(allowed_token_ids=[1, 2], stop_token_ids=[1, 2], min_tokens=1)
    assert SamplingParams(allowed_token_ids=[1, 2], stop_token_ids=[1, 2]).allowed_token_ids == {
        1,
        2,
    }


def test_contradictory_params_are_rejected() -> None:
    with pytest.raises(
        InvalidRequest, match="min_tokens=5 exceeds max_tokens=4; lower min_tokens or raise"
    ):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequest, match="sampling_mask needs temperature > 0 and a filter"):
        SamplingParams(sampling_mask=True)
    with pytest.raises(InvalidRequest, match="sampling_mask"):
        SamplingParams(sampling_mask=True, top_k=5, temperature=0)
    for filters in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(sampling_mask=True, **filters).filters


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        ({}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.5}, True),
        ({"min_p": 0.5}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.5, "temperature": 0}, False),
    ],
)
def test_has_filters_detects_active_filters(options: dict[str, Any], filters: bool) -> None:
    assert SamplingParams(**options).filters == filters


def test_range_bounds_are_inclusive() -> None:
    SamplingParams(
        temperature=0,
        top_p=1,
        min_p=0,
        max_tokens=1,
        top_k=0,
        min_tokens=1,
        seed=0,
        priority=-(2**31),
    )
    SamplingParams(
        temperature=1e30, top_p=1e-30, min_p=1, max_tokens=10**9, top_k=10**9, seed=2**64 - 1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"temprature": 1.0},
            "SamplingParams has no option 'temprature'; did you mean 'temperature'",
        ),
        ({"n": 4}, "SamplingParams has no option 'n'"),
        ({"qqq": 4}, "it has temperature, .*priority"),
    ],
)
def test_unknown_option_names_the_nearest(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**options)


def test_params_are_frozen_hashable_and_compare_by_value() -> None:
    params = SamplingParams(stop_token_ids=frozenset({1}))
    assert params == SamplingParams(stop_token_ids=frozenset({1}))
    assert hash(params) == hash(SamplingParams(stop_token_ids=frozenset({1})))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InvalidRequest, match="temperature"):
        dataclasses.replace(params, temperature=-1)


def test_samples_are_frozen() -> None:
    sample = TrainingSample((1,), (2,), (-0.5,), None, 0, "stop")
    for record, name in [(sample, "logprobs"), (VersionSpan(0, 0, 1), "end")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, ())
        assert not hasattr(record, "__dict__")


def test_param_errors_are_also_python_errors() -> None:
    assert issubclass(InvalidRequest, NanoInferenceError)
    assert issubclass(InvalidRequest, ValueError)
    assert issubclass(RequestTooLarge, InvalidRequest)
