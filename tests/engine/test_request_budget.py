"""The request budget in an engine: rejection before a request starts, and masks that grow while it
runs.
"""

import pytest

from nano_inference import RequestTooLarge, SamplingParams, TrainingSample
from nano_inference.types import Delta
from tests.weights.weight_cases import Build

VOCAB = 300  # vocabulary of the tiny model


def whole_vocabulary(max_tokens: int = 40, seed: int = 3) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=2,
        min_p=1e-300,
        sampling_mask=True,
        ignore_eos=True,
    )


def bits(sample: TrainingSample) -> object:
    return (
        sample.completion_tokens,
        sample.logprobs,
        sample.sampling_mask,
        sample.finish_reason,
        sample.stop_reason,
    )


@pytest.mark.parametrize("call", ["generate", "add_request", "submit"])
def test_request_over_budget_is_rejected_and_the_suggestion_fits(build: Build, call: str) -> None:
    engine = build(max_request_entries=1000)

    def ask(num_samples: int) -> object:
        params = SamplingParams(max_tokens=50, top_logprobs=4)
        if call == "submit":
            return engine.submit([1, 2], params, num_samples, lambda _: None, stream=False)
        return getattr(engine, call)([1, 2], params, num_samples)

    with pytest.raises(
        RequestTooLarge,
        match=r"up to 2002 entries.*max_request_entries=1000.*top_logprobs from 4 to 1",
    ):
        ask(8)
    assert not engine.has_pending()
    assert ask(3) is not None


def test_oversized_mask_ends_only_its_sample(build: Build) -> None:
    free, bounded = build(), build(max_request_entries=6000)
    narrow = SamplingParams(max_tokens=30, seed=4, top_k=5, sampling_mask=True, ignore_eos=True)
    wide = whole_vocabulary()
    expected = free.generate([[1, 5, 6]], narrow, 2)
    (whole,) = free.generate([[1, 7]], wide)
    engine_samples = bounded.generate([[1, 7], [1, 5, 6]], [wide, narrow], 2)
    assert [bits(each) for each in engine_samples[2:]] == [bits(each) for each in expected]
    for sample in engine_samples[:2]:
        assert sample.finish_reason == "abort"
        assert "max_request_entries" in str(sample.stop_reason)
        assert sample.sampling_mask is not None
        assert len(sample.sampling_mask.token_ids) <= 3000
        # rows of 300 and of 2,960 ids
        assert len(sample.sampling_mask.rows()) == len(sample.completion_tokens) == 9
    first, count = engine_samples[0], 9
    assert first.completion_tokens == whole.completion_tokens[:count]
    assert first.logprobs == whole.logprobs[:count]
    assert whole.sampling_mask is not None
    assert first.sampling_mask is not None
    assert first.sampling_mask.rows() == whole.sampling_mask.rows()[:count]
    assert whole.finish_reason == "length"


def test_stream_gets_each_token_before_the_mask_overflows(build: Build) -> None:
    engine = build(max_request_entries=3000)
    deltas: list[Delta] = list(engine.generate([1, 7], whole_vocabulary(), stream=True))
    (sample,) = (delta.finished for delta in deltas if delta.finished is not None)
    assert sample.finish_reason == "abort"
    assert sum((delta.token_ids for delta in deltas), ()) == sample.completion_tokens


def test_request_budget_is_a_hard_limit(build: Build) -> None:
    engine = build()
    with pytest.raises(RequestTooLarge, match="max_request_entries=100"):
        engine.submit(
            [1, 2], SamplingParams(max_tokens=200), 1, lambda _: None, stream=False, max_entries=100
        )


def test_mask_resumes_with_its_sample(build: Build) -> None:
    engine = build(max_request_entries=6000)
    (part,) = engine.generate([1, 7], whole_vocabulary(max_tokens=5))
    (whole,) = build().generate([1, 7], whole_vocabulary(max_tokens=15))
    engine.resume_from(part, max_new_tokens=10)
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    assert samples[0].sampling_mask == whole.sampling_mask
