"""`num_wanted`: the first k finished samples of a group are returned, and the others end without
losing tokens.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import (
    AsyncInferenceEngine,
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
    VersionGone,
)
from nano_inference.types import GROUP_COMPLETE, VERSION_GONE, Delta
from tests.depth import at_depth
from tests.weights.weight_cases import NEW, PROMPT, Build, drain

LONGEST = 60
# one id in sixteen ends a sample, so lengths vary widely
STOPS = frozenset(range(0, 128, 16))


def drawn(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LONGEST, "seed": 5, "stop_token_ids": STOPS, **more})


def bits(
    sample: TrainingSample, length: int | None = None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return sample.completion_tokens[:length], sample.logprobs[:length]


def engine_of(model: Path, **options: Any) -> InferenceEngine:
    settled = {
        "model_path": str(model),
        "num_threads": 1,
        "kv_cache_memory": 2**20,
        "seed": 0,
        "block_size": 4,
    }
    return InferenceEngine(EngineConfig(**(settled | options)))


@pytest.fixture(scope="module")
def whole(model: Path) -> list[TrainingSample]:
    """Complete group to compare with."""
    with engine_of(model) as engine:
        samples = engine.generate(PROMPT, drawn(), 8)
    assert len({len(sample.completion_tokens) for sample in samples}) > 3
    return samples


@settings(max_examples=at_depth(15), deadline=None)
@given(
    num_wanted=st.integers(1, 8),
    lookahead=st.integers(0, 1),
    cache_type=st.sampled_from(["paged", "radix"]),
    tokens=st.sampled_from([2, 5, 64]),
    memory=st.sampled_from([2**20, 2**16]),
)
def test_group_ends_when_enough_samples_finished(
    model: Path,
    whole: list[TrainingSample],
    num_wanted: int,
    lookahead: int,
    cache_type: str,
    tokens: int,
    memory: int,
) -> None:
    options: dict[str, Any] = {
        "lookahead": lookahead,
        "cache_type": cache_type,
        "max_tokens_per_batch": tokens,
    }
    with engine_of(model, **options, kv_cache_memory=memory) as engine:
        check_group(engine, whole, num_wanted)


def check_group(engine: InferenceEngine, whole: list[TrainingSample], num_wanted: int) -> None:
    """Run a group and check how it ends."""
    ends: dict[int, int] = {}
    engine.add_request(PROMPT, drawn(), 8, num_wanted=num_wanted)
    samples: list[TrainingSample] = []
    while engine.has_pending():
        came = engine.step()
        samples += came
        ends |= {sample.sample_index: engine.stats().num_steps for sample in came}
        if any(sample.stop_reason == GROUP_COMPLETE for sample in came):
            stats = engine.stats()
            assert stats.num_free_blocks == stats.num_blocks, "the rest keeps its memory"
    finished = [sample for sample in samples if sample.finish_reason != "abort"]
    rest = [sample for sample in samples if sample.finish_reason == "abort"]
    assert len(samples) == 8
    assert len(finished) >= num_wanted
    for sample in finished:
        assert bits(sample) == bits(whole[sample.sample_index])
    for sample in rest:
        assert sample.stop_reason == GROUP_COMPLETE
        length = len(sample.completion_tokens)
        assert bits(sample) == bits(whole[sample.sample_index], length)
        assert length < len(whole[sample.sample_index].completion_tokens), (
            "a finished sample was thrown away"
        )
    complete = sorted(ends[sample.sample_index] for sample in finished)[num_wanted - 1]
    assert {ends[sample.sample_index] for sample in rest} <= {complete}


def test_straggler_resumes_from_its_last_token(build: Build, whole: list[TrainingSample]) -> None:
    engine = build(lookahead=1)
    samples = engine.generate(PROMPT, drawn(), 8, num_wanted=2)
    rest = [sample for sample in samples if sample.finish_reason == "abort"]
    assert rest
    for sample in rest:
        engine.resume_from(sample)
    for sample in drain(engine):
        assert bits(sample) == bits(whole[sample.sample_index])


def test_resumed_samples_keep_their_group(build: Build) -> None:
    """Two groups with two turns each: GRPO computes advantages over one `group_id`."""
    engine = build(lookahead=1)
    short = SamplingParams(max_tokens=2, temperature=1.0, ignore_eos=True)
    first, second = (engine.add_request(PROMPT, short, 3) for _ in range(2))
    samples = drain(engine)
    for _ in range(2):
        assert sorted(s.group_id for s in samples) == [first] * 3 + [second] * 3
        for sample in samples:
            engine.resume_from(sample, append=[5, 6], max_new_tokens=2)
        samples = drain(engine)
    assert {len(s.completion_tokens) for s in samples} == {10}
    assert len({s.request_id for s in samples} & {first, second}) == 0
    seats = {(s.group_id, s.sample_index) for s in samples}
    assert seats == {(group, index) for group in (first, second) for index in range(3)}


@pytest.mark.parametrize("steps", range(1, 12, 3))
def test_group_ignores_pauses_preemptions_and_neighbors(
    build: Build, whole: list[TrainingSample], steps: int
) -> None:
    engine = build(lookahead=1)
    group = engine.add_request(PROMPT, drawn(), 8, num_wanted=3)
    other = engine.add_request(PROMPT, drawn(), 8)
    samples: list[TrainingSample] = []
    for _ in range(steps):
        samples += engine.step()
    engine.sleep()
    engine.wake()
    samples += drain(engine)
    others = sorted((s for s in samples if s.request_id == other), key=lambda s: s.sample_index)
    assert list(map(bits, others)) == list(map(bits, whole))
    for sample in samples:
        if sample.request_id == group:
            assert bits(sample) == bits(whole[sample.sample_index], len(sample.completion_tokens))


def test_accept_sees_only_finished_samples(build: Build) -> None:
    engine = build(ref_model_path=str(build().config.model_path))
    samples = engine.generate(PROMPT, drawn(), 8, num_wanted=3)
    for sample in samples:
        assert (sample.ref_logprobs is None) == (sample.finish_reason == "abort")
    assert sum(sample.finish_reason != "abort" for sample in samples) >= 3
    assert not engine.has_pending()


def test_group_streams_of_cancelled_samples_end(build: Build) -> None:
    seen: dict[int, list[Delta]] = {}
    for delta in build(lookahead=1).generate(PROMPT, drawn(), 8, stream=True, num_wanted=2):
        seen.setdefault(delta.sample_index, []).append(delta)
    for deltas in seen.values():
        sample = deltas[-1].finished
        assert sample is not None
        assert (
            tuple(token for delta in deltas for token in delta.token_ids)
            == sample.completion_tokens
        )
    assert len(seen) == 8


def test_async_engine_supports_num_wanted(build: Build) -> None:
    async def test() -> None:
        async with AsyncInferenceEngine(build()) as engine:
            samples = await engine.generate([PROMPT, [3, 4]], drawn(), 4, num_wanted=1)
            assert [sample.sample_index for sample in samples] == [0, 1, 2, 3] * 2
            assert any(sample.stop_reason == GROUP_COMPLETE for sample in samples)
            async for delta in engine.stream(PROMPT, drawn(), 8, num_wanted=1):
                assert delta.sample_index < 8

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("num_wanted", [0, 3, -1, True, 1.0, "1"])
def test_num_wanted_rejects_invalid_values(build: Build, num_wanted: Any) -> None:
    engine = build()
    with pytest.raises(InvalidRequest, match="num_wanted="):
        engine.generate(PROMPT, drawn(), 2, num_wanted=num_wanted)
    assert not engine.has_pending()


# -- one version -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
def test_version_limit_holds_a_request_until_it_is_live(build: Build, lookahead: int) -> None:
    engine = build(lookahead=lookahead)
    engine.add_request(PROMPT, drawn(), exact_version=1)
    assert not engine.has_pending() or engine.step() == []
    assert not engine.has_pending()
    engine.update_weights(NEW)
    (sample,) = drain(engine)
    assert sample.weight_versions[0].version == 1
    assert bits(sample) == bits(build(NEW).generate(PROMPT, drawn())[0])
    with pytest.raises(
        VersionGone, match="exact_version=0 was replaced; this engine serves version 1"
    ):
        engine.add_request(PROMPT, drawn(), exact_version=0)
    assert not engine.has_pending()


@pytest.mark.parametrize("state", ["held", "waiting", "computing"])
def test_request_ends_empty_if_its_version_is_skipped(build: Build, state: str) -> None:
    engine = build(max_tokens_per_batch=8)
    engine.add_request(PROMPT, drawn(), exact_version=1 if state == "held" else 0)
    if state == "computing":
        engine.step()
        assert engine.stats().num_running == 1
    engine.update_weights(NEW, version=7)
    (sample,) = drain(engine)
    assert (sample.finish_reason, sample.stop_reason, sample.completion_tokens) == (
        "abort",
        VERSION_GONE,
        (),
    )


def test_running_request_continues_under_the_next_version(build: Build) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn(), exact_version=0)
    for _ in range(3):
        engine.step()
    engine.update_weights(NEW, kv_policy="recompute")
    (sample,) = drain(engine)
    assert [span.version for span in sample.weight_versions] == [0, 1]
