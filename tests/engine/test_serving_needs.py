"""Engine features for servers: counters, leak detection, cancellation, and ids known in advance."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from nano_inference import Delta, InferenceEngine, InvalidRequest, SamplingParams
from nano_inference.engine.async_engine import AsyncInferenceEngine
from tests.weights.weight_cases import Build, drain

PARAMS = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
LONG = [3 + i % 200 for i in range(100)]


# -- leaks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_blocks_do_not_leak_however_requests_end(build: Build, cache_type: str) -> None:
    engine = build(cache_type=cache_type, max_chunk_tokens=8)
    for steps in range(8):
        engine.add_request(LONG, PARAMS, 2)
        engine.add_request(LONG[:30], PARAMS)
        for _ in range(steps):
            engine.step()
            assert engine.loop.leaked_blocks() == 0
        engine.abort()
        assert engine.stats().kv_leaked_blocks == 0
        engine.generate(LONG[:50], PARAMS, 3)
        assert engine.stats().kv_leaked_blocks == 0


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_leak_is_counted_and_logged_once(
    build: Build, cache_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(cache_type=cache_type)
    engine.generate(LONG, PARAMS)
    engine.cache.allocate(LONG[:10])  # three blocks that no sequence ever frees
    assert engine.loop.leaked_blocks() == 3
    assert engine.stats().kv_leaked_blocks == 0, "not checked yet"
    engine.add_request(LONG[50:], PARAMS, 2)
    engine.step()
    assert engine.loop.leaked_blocks() == 3, "blocks of live sequences are none"
    while engine.has_pending():  # not `drain`, which checks the cache
        engine.step()
    assert engine.stats().kv_leaked_blocks == 3
    engine.generate(LONG, PARAMS)
    assert [record.message for record in caplog.records if "leaked" in record.message] == [
        "leaked 3 KV blocks (a bug in the engine)"
    ]


def test_leak_is_detected_if_blocks_are_not_freed(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    with monkeypatch.context() as broken:
        broken.setattr(engine.cache, "deallocate", lambda *_: None)
        engine.generate(LONG, PARAMS)
    assert engine.stats().kv_leaked_blocks == -(-(len(LONG) + 5) // 4)


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("steps", [1, 3, 12, 15])
def test_cancelled_request_frees_memory_within_one_step(
    build: Build, steps: int, lookahead: int, stream: bool
) -> None:
    """Cancel in the middle of a long prompt, in its last step, and after it, next to a running
    request.
    """
    engine, arrived = build(lookahead=lookahead, max_chunk_tokens=8), list[Delta]()
    other = engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    request_id = engine.submit(LONG, PARAMS, 3, arrived.append, stream=stream)
    for _ in range(steps):
        engine.step()
    mine = [seq for seq in engine.loop.sequences.by_id.values() if seq.request_id == request_id]
    assert sum(len(seq.block_ids) for seq in mine) >= min(8 * steps, len(LONG)) // 4
    engine.abort_soon(request_id)
    engine.step()
    engine.loop.check()
    (left,) = engine.loop.sequences.by_id.values()
    assert left.request_id == other
    assert engine.cache.num_blocks - engine.cache.num_free_blocks() == len(left.block_ids)
    ended = [delta.finished for delta in arrived if delta.finished is not None]
    assert [(s.sample_index, s.finish_reason) for s in ended] == [(i, "abort") for i in range(3)]
    drain(engine)
    assert engine.stats().kv_leaked_blocks == 0


# -- ids -------------------------------------------------------------------------------------------


def test_request_id_is_known_before_the_first_delta(build: Build) -> None:
    """Another thread steps constantly. No delta may arrive under an unknown id."""
    engine = build()
    known, strange = set[int](), list[int]()
    ended = threading.Semaphore(0)

    def sink(delta: Delta) -> None:
        if delta.request_id not in known:
            strange.append(delta.request_id)
        if delta.finished is not None:
            ended.release()

    stepping = AsyncInferenceEngine(engine)
    try:
        for i in range(40):
            request_id = engine.intake.new_request_id()
            known.add(request_id)
            params = SamplingParams(max_tokens=1 + i % 2, seed=i, ignore_eos=True)
            assert (
                engine.submit([1 + i], params, 1, sink, stream=True, request_id=request_id)
                == request_id
            )
        for _ in range(40):
            assert ended.acquire(timeout=60)
    finally:
        stepping.stop()
    assert not strange
    assert len(known) == 40


def test_deltas_may_arrive_before_the_request_id(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may be faster than the call that added the request."""
    engine, arrived = build(), list[Delta]()
    post = engine.shared.post

    def post_and_run(message: Any) -> None:
        post(message)
        drain(engine)

    monkeypatch.setattr(engine.shared, "post", post_and_run)
    request_id = engine.submit([1, 2], PARAMS, 2, arrived.append, stream=False)
    assert [delta.finished is not None for delta in arrived] == [True, True]
    assert {delta.request_id for delta in arrived} == {request_id}


def test_request_id_must_be_reserved_and_unused(build: Build) -> None:
    engine = build()
    request_id = engine.submit([1], PARAMS, 1, lambda _: None, stream=False)
    for wrong, why in ((99, "request id 99 does not exist"), (request_id, "is in use")):
        with pytest.raises(InvalidRequest, match=why):
            engine.submit([1], PARAMS, 1, lambda _: None, stream=False, request_id=wrong)
    drain(engine)
    assert not engine.shared.delivery.open_requests()


# -- counters --------------------------------------------------------------------------------------


def test_prompts_and_look_ups_are_counted(build: Build) -> None:
    engine = build()
    engine.generate(LONG, PARAMS, 3)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.prompt_tokens_queried, stats.prompt_tokens_cached) == (
        100,
        100,
        0,
    )
    engine.generate(LONG[:50], PARAMS)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.prompt_tokens_queried, stats.prompt_tokens_cached) == (
        150,
        150,
        48,
    )
    assert stats.prompt_tokens_computed + stats.prompt_tokens_cached == stats.prompt_tokens
    assert stats.completion_tokens == 4 * 6


def test_preempted_prompt_counts_once_but_is_looked_up_twice(build: Build) -> None:
    engine = build(kv_cache_memory=2**15, max_model_len=64)
    requests: list[Callable[[InferenceEngine], int]] = [
        lambda e, i=i: e.add_request(
            [i, i + 1, i + 2], SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
        )
        for i in range(4)
    ]
    for add in requests:
        add(engine)
    drain(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prompt_tokens == 12
    assert stats.prompt_tokens_queried > 12 + 3 * stats.num_preemptions
    assert stats.kv_leaked_blocks == 0


def test_disabled_prefix_cache_counts_no_lookups(build: Build) -> None:
    engine = build(enable_prefix_caching=False)
    engine.generate(LONG, PARAMS)
    assert (engine.stats().prompt_tokens, engine.stats().prompt_tokens_queried) == (100, 0)
