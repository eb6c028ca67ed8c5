"""Pausing, sleeping, aborting and resuming between two tokens do not change the tokens."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from nano_inference import (
    AsyncInferenceEngine,
    InvalidRequest,
    RequestTooLarge,
    SamplingParams,
    TrainingSample,
    VersionSpan,
    WeightUpdateError,
)
from tests.standing import stand_still
from tests.weights.weight_cases import NEW, PROMPT, Build, drain, until

LENGTH = 12
PATIENCE = 30.0  # seconds; a hanging test fails


def drawn(max_tokens: int = LENGTH, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": max_tokens, "seed": 3, "ignore_eos": True, "raw_logprobs": True, **more}
    )


def same(one: TrainingSample, other: TrainingSample) -> bool:
    """Return the computed fields of a sample for a bitwise comparison."""
    ignored: dict[str, Any] = {
        "request_id": 0,
        "group_id": 0,
        "cached_tokens": 0,
        "kv_versions": (),
    }
    ignored |= {"sampling_params": None}
    one, other = replace(one, **ignored), replace(other, **ignored)
    return repr(one) == repr(other)  # so that NaN equals NaN


# -- pause -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_pause_changes_no_bit(build: Build, lookahead: int, steps: int) -> None:
    expected = build().generate(PROMPT, drawn())[0]
    engine = build(lookahead=lookahead)
    engine.add_request(PROMPT, drawn())
    for _ in range(steps):
        engine.step()
    assert engine.pause() == []
    assert engine.is_paused()
    assert not engine.loop.in_flight
    computed = engine.stats().tokens_computed
    engine.add_request(PROMPT, drawn(), num_samples=2)
    for _ in range(3):
        assert engine.step() == []
    assert engine.stats().tokens_computed == computed, "nothing is computed"
    assert not engine.has_pending(), "a loop over has_pending must end"
    engine.resume()
    samples = drain(engine)
    assert same(samples[0], expected)
    assert same(samples[1], expected)


def test_waiting_pause_holds_new_requests(build: Build) -> None:
    engine = build(lookahead=1)
    done: list[TrainingSample] = []
    first = engine.add_request(PROMPT, drawn())
    engine.step()
    assert engine.pause("wait") == []
    second = engine.add_request(PROMPT, drawn())
    done += engine.step()
    assert [s.request_id for s in done] == [first]
    assert done[0].finish_reason == "length"
    assert engine.stats().num_held == 1
    engine.resume()
    assert [s.request_id for s in drain(engine)] == [second]


def test_aborting_pause_returns_partial_samples(build: Build) -> None:
    engine = build(lookahead=1)
    engine.add_request(PROMPT, drawn(), num_samples=2)
    for _ in range(4):
        engine.step()
    ended = engine.pause("abort")
    assert [s.finish_reason for s in ended] == ["abort", "abort"]
    assert all(
        0 < len(s.completion_tokens) == len(s.logprobs) == len(s.raw_logprobs or ()) for s in ended
    )
    assert not engine.loop.sequences.by_id
    engine.resume()


def test_generate_waits_for_another_threads_resume(build: Build) -> None:
    engine = build()
    expected = engine.generate(PROMPT, drawn())[0]
    pausing = threading.Thread(target=engine.pause)
    pausing.start()
    pausing.join()
    samples: list[TrainingSample] = []
    thread = threading.Thread(target=lambda: samples.extend(engine.generate(PROMPT, drawn())))
    thread.start()
    time.sleep(0.2)
    assert not samples
    engine.resume()
    thread.join(PATIENCE)
    assert same(samples[0], expected)


def test_generate_rejects_a_pause_by_its_own_thread(build: Build) -> None:
    engine = build()
    engine.pause()
    with pytest.raises(
        InvalidRequest, match="this thread paused the engine and would wait for itself"
    ):
        engine.generate(PROMPT, drawn())
    engine.add_request(PROMPT, drawn())
    engine.resume()
    engine.step()
    engine.pause()
    with pytest.raises(WeightUpdateError, match="would wait for paused requests"):
        engine.update_weights(NEW, blocking=True, kv_policy="wait")
    engine.update_weights(NEW, blocking=True)
    assert engine.get_weight_version() == 1
    engine.resume()
    assert len(drain(engine)) == 1


def test_shutdown_ends_a_wait(build: Build) -> None:
    engine = build()
    pausing = threading.Thread(target=engine.pause)
    pausing.start()
    pausing.join()
    problems: list[BaseException] = []

    def wait() -> None:
        try:
            engine.generate(PROMPT, drawn())
        except Exception as problem:
            problems.append(problem)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    engine.shutdown()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert "shut down" in str(problems[0])


def test_unknown_mode_is_an_error(build: Build) -> None:
    with pytest.raises(InvalidRequest, match="'stop' must be one of keep, wait, abort"):
        build().pause("stop")


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_async_engine_pauses(build: Build, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    engine = build()
    expected = engine.generate(PROMPT, drawn(40))[0]
    first, go_on = engine.loop.num_steps, stand_still(monkeypatch, engine.loop)

    async def main() -> TrainingSample:
        async with AsyncInferenceEngine(engine) as a:
            task = asyncio.create_task(a.generate(PROMPT, drawn(40)))
            await until(lambda: engine.loop.num_steps == first + 3)
            pausing = asyncio.create_task(a.pause(mode))
            if mode == "wait":
                await until(lambda: not engine.loop.life.admitting)
                go_on.set()
            await pausing
            go_on.set()
            assert engine.loop.num_steps - first == (3 if mode == "keep" else 40)
            assert not engine.loop.in_flight
            await a.resume()
            return (await asyncio.wait_for(task, PATIENCE))[0]

    assert same(asyncio.run(main()), expected)


# -- resuming --------------------------------------------------------------------------------------


@pytest.mark.thorough(cases=["0-radix"])
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_partial_sample_resumes_token_for_token(
    build: Build, cache_type: str, lookahead: int
) -> None:
    requests = {
        "sampling_mask": True,
        "top_logprobs": 2,
        "prompt_logprobs": True,
        "prompt_top_logprobs": 3,
    }
    params = drawn(top_k=20, presence_penalty=0.5, **requests)
    expected = build().generate(PROMPT, params, 2)
    for steps in range(1, LENGTH + 1):
        engine = build(cache_type=cache_type, lookahead=lookahead, max_tokens_per_batch=16)
        engine.add_request(PROMPT, params, 2)
        for _ in range(steps):
            engine.step()
        partial = engine.abort()
        assert [s.sample_index for s in partial] == [0, 1]
        for sample in partial:
            engine.resume_from(sample)
        samples = drain(engine)
        assert all(same(*pair) for pair in zip(samples, expected, strict=True)), (
            f"after {steps} steps"
        )
        engine.shutdown()


def test_resume_from_reuses_the_cache(build: Build) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn())
    for _ in range(8):
        engine.step()
    (partial,) = engine.abort()
    before = engine.stats().tokens_computed
    engine.resume_from(partial)
    engine.step()
    known = len(PROMPT) + len(partial.completion_tokens)
    assert engine.stats().tokens_computed - before == known - (known - 1) // 4 * 4


def test_resume_from_continues_a_length_limited_sample(build: Build) -> None:
    engine = build()
    long = engine.generate(PROMPT, drawn(20))[0]
    short = engine.generate(PROMPT, drawn(8))[0]
    with pytest.raises(InvalidRequest, match="has 8 of max_tokens=8"):
        engine.resume_from(short)
    engine.resume_from(short, max_new_tokens=12)
    (sample,) = drain(engine)
    assert same(sample, long)
    assert sample.sampling_params == replace(drawn(), max_tokens=20)


def test_resume_from_appends_tool_turns(build: Build) -> None:
    """Appended tokens are marked in the sample, and the model reads them."""
    engine = build()
    first = engine.generate(PROMPT, drawn(6))[0]
    tool = [7, 8, 9]
    engine.resume_from(first, append=tool, max_new_tokens=5)
    (second,) = drain(engine)
    assert second.completion_tokens[:9] == (*first.completion_tokens, *tool)
    assert second.loss_mask == (True,) * 6 + (False,) * 3 + (True,) * 5
    assert second.logprobs[6:9] == (0.0,) * 3
    assert second.logprobs[:6] == first.logprobs
    alone = engine.generate([*PROMPT, *second.completion_tokens[:9]], drawn(5))[0]
    assert second.completion_tokens[9:] == alone.completion_tokens
    assert second.logprobs[9:] == alone.logprobs
    assert [(e.token_start, e.token_end) for e in second.kv_versions] == [(0, 6), (9, 14)]
    assert second.weight_versions == (VersionSpan(0, 0, 14),)
    engine.update_weights(NEW)
    engine.resume_from(second, append=[5], max_new_tokens=2)
    (third,) = drain(engine)
    assert third.loss_mask == (*second.loss_mask, False, True, True)
    assert third.weight_versions == (VersionSpan(0, 0, 15), VersionSpan(1, 15, 17))
    assert (
        len(third.logprobs) == len(third.raw_logprobs or ()) == len(third.log_kept_mass or ()) == 17
    )


def test_resume_from_continues_a_stopped_sample_after_new_tokens(build: Build) -> None:
    engine = build()
    first = engine.generate(PROMPT, drawn(6))[0]
    params = drawn(6, stop_token_ids=frozenset([first.completion_tokens[2]]))
    stopped = engine.generate(PROMPT, params)[0]
    assert stopped.finish_reason == "stop"
    with pytest.raises(InvalidRequest, match="append tokens"):
        engine.resume_from(stopped)
    engine.resume_from(stopped, append=[4], max_new_tokens=2)
    (sample,) = drain(engine)
    assert sample.completion_tokens[:4] == (*stopped.completion_tokens, 4)


def test_resume_from_honors_an_exact_version(build: Build) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn(30))
    engine.add_request(PROMPT, drawn())
    for _ in range(4):
        engine.step()
    (partial,) = engine.abort(1)
    engine.update_weights(NEW, kv_policy="finish_old")
    with pytest.raises(InvalidRequest, match="version 7 is not live; this engine serves version 1"):
        engine.resume_from(partial, version=7)
    resumed = engine.resume_from(partial, version=0)
    samples = drain(engine)
    assert {s.weight_version for s in samples} == {0}
    expected = build().generate(PROMPT, drawn())[0]
    assert same(next(s for s in samples if s.request_id == resumed), expected)
    with pytest.raises(InvalidRequest, match="version 0 is not live"):
        engine.resume_from(partial, version=0)


def test_resume_from_rejects_samples_that_cannot_continue(build: Build) -> None:
    engine = build()
    sample = engine.generate(PROMPT, drawn(4))[0]
    for bad, message in [
        ({"append": [999]}, "outside the vocabulary"),
        ({"append": ["x"]}, "must be an integer"),
        ({"max_new_tokens": 0}, "must be a positive integer"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            engine.resume_from(sample, **bad)
    early = replace(sample, sampling_params=replace(drawn(30), min_tokens=20))
    with pytest.raises(InvalidRequest, match="before its min_tokens=20; set at least 16"):
        engine.resume_from(early, max_new_tokens=5)
    with pytest.raises(RequestTooLarge, match="max_model_len"):
        engine.resume_from(sample, max_new_tokens=100_000)
    with pytest.raises(InvalidRequest, match="the bits would differ"):
        engine.resume_from(replace(sample, numerics="cuda-9"), max_new_tokens=1)
    with pytest.raises(InvalidRequest, match="no sampling_params"):
        engine.resume_from(replace(sample, sampling_params=None), max_new_tokens=1)
    assert not engine.loop.sequences.by_id
    assert not engine.has_pending()


def test_async_engine_resumes_samples(build: Build) -> None:
    engine = build()
    expected = engine.generate(PROMPT, drawn(20))[0]
    short = engine.generate(PROMPT, drawn(8))[0]

    async def main() -> TrainingSample:
        async with AsyncInferenceEngine(engine) as a:
            return await a.resume_from(short, max_new_tokens=12)

    assert same(asyncio.run(main()), expected)
