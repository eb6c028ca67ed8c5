"""Metadata of deltas, with and without streaming."""

from collections import defaultdict

import pytest

from nano_inference import Delta, InferenceEngine, SamplingParams, TrainingSample
from tests.weights.weight_cases import Build

PARAMS = SamplingParams(max_tokens=6, seed=3, top_logprobs=2, raw_logprobs=True, ignore_eos=True)
PROMPT = list(range(5, 16))


def run(
    engine: InferenceEngine, params: SamplingParams, *, stream: bool, num_samples: int = 3
) -> list[Delta]:
    deltas: list[Delta] = []
    engine.submit(PROMPT, params, num_samples, deltas.append, stream=stream)
    while engine.has_pending():
        engine.step()
    return deltas


def by_sample(deltas: list[Delta]) -> dict[int, list[Delta]]:
    deltas_of: dict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        deltas_of[delta.sample_index].append(delta)
    return deltas_of


def finished(deltas: list[Delta]) -> TrainingSample:
    sample = deltas[-1].finished
    assert sample is not None
    return sample


@pytest.mark.parametrize("lookahead", [0, 1])
def test_deltas_join_to_the_sample(build: Build, lookahead: int) -> None:
    engine = build(lookahead=lookahead)
    for mine in by_sample(run(engine, PARAMS, stream=True)).values():
        sample = finished(mine)
        assert sample.top_logprobs == tuple(t for d in mine for t in d.top_logprobs or ())
        assert sample.raw_logprobs == tuple(p for d in mine for p in d.raw_logprobs or ())
        assert sample.logprobs == tuple(p for d in mine for p in d.logprobs)
        for delta in mine:
            assert delta.top_logprobs is not None
            assert len(delta.top_logprobs) == len(delta.token_ids) == len(delta.raw_logprobs or ())


def test_delta_fields_are_none_unless_requested(build: Build) -> None:
    plain = SamplingParams(max_tokens=3, seed=3, ignore_eos=True)
    for stream in (True, False):
        for delta in run(build(), plain, stream=stream):
            assert delta.top_logprobs is None
            assert delta.raw_logprobs is None


@pytest.mark.parametrize("stream", [True, False])
def test_deltas_report_cached_tokens_and_queue_time(build: Build, stream: bool) -> None:
    engine = build(max_batch_size=3)
    first = run(engine, PARAMS, stream=stream)
    assert {delta.cached_tokens for delta in first} == {0}
    # fills the batch
    engine.add_request([1, 2], SamplingParams(max_tokens=40, seed=1, ignore_eos=True), 3)
    engine.step()
    again = run(engine, PARAMS, stream=stream)
    assert {delta.cached_tokens for delta in again} == {8}
    waited = {delta.queued for delta in again}
    assert len({delta.queued for delta in first}) == 1
    assert len(waited) == 1, "a request waits once for all its samples"
    assert min(waited) > first[0].queued, "the request waited for forty steps of others"


def test_preemption_does_not_queue_again(build: Build) -> None:
    engine = build(kv_cache_memory=2**15, block_size=4, max_model_len=64)
    arrived: list[Delta] = []
    long = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    for prompt in ([1, 2, 3], [4, 5, 6], [7, 8, 9], [3, 1, 2]):
        engine.submit(prompt, long, 1, arrived.append, stream=True)
    while engine.has_pending():
        engine.step()
    assert engine.stats().num_preemptions
    for request_id in range(4):
        assert len({delta.queued for delta in arrived if delta.request_id == request_id}) == 1


def test_request_aborted_in_the_queue_reports_its_queue_time(build: Build) -> None:
    engine = build(max_batch_size=1)
    engine.add_request([1, 2], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    engine.step()
    arrived: list[Delta] = []
    waiting = engine.submit([3], PARAMS, 1, arrived.append, stream=True)
    engine.step()
    engine.abort_soon(waiting)
    engine.step()
    assert [delta.finished is not None for delta in arrived] == [False, True]
    assert arrived[0].queued == arrived[1].queued > 0
