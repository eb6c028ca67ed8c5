"""Replay reproduces every sample bit for bit under any updates, pauses, aborts and resumptions.

A replay follows `kv_versions` and ignores caches and schedules. A stale hit, a published block of
mixed versions, an old tensor that changed with the new ones, or a wrongly reported version would
change bits.
"""

import typing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.rl import differences
from nano_inference.rl.replayer import Replayer
from nano_inference.types import KvPolicy, PauseMode
from tests.depth import at_depth
from tests.invariance.scenario import Schedule, poison, threads_restored
from tests.invariance.test_schedule_invariance import (
    BACKENDS,
    BAD_WORDS,
    CLOSES,
    DTYPES,
    VALUES_PER_TOKEN,
    bytes_per_token,
    on,
    opening_ids,
    schedules_and_codes,
)
from tests.models.tiny import Weights, llama_config, llama_weights, tiny_llama
from tests.structured.vocabularies import with_tokenizer

VOCAB = 900
MODELS = [llama_weights(llama_config(vocab_size=VOCAB), seed=seed) for seed in range(5)]
NAMES = sorted(MODELS[0])
STEM = [(7 * i) % 290 + 3 for i in range(80)]  # shared by all prompts, so stale hits are likely


@dataclass(frozen=True)
class Event:
    """An event before a step."""

    step: int
    kind: str
    policy: Any = None  # of an update, or the mode of a pause
    names: int = 0  # of an update: number of changed tensors; 0: all


@dataclass(frozen=True)
class Ask:
    """A request."""

    arrives: int
    prompt: tuple[int, ...]
    params: SamplingParams
    num_samples: int
    max_staleness: int | None


asks = st.builds(
    Ask,
    arrives=st.integers(0, 14),
    prompt=st.builds(
        lambda stem, tail, thought: tuple(STEM[:stem] + tail + (opening_ids() if thought else [])),
        st.sampled_from([0, 16, 33, 64, 70]),
        st.lists(st.integers(3, 290), min_size=1, max_size=6),
        st.booleans(),
    ),
    params=st.builds(
        lambda budget, max_tokens, **options: SamplingParams(
            thinking_token_budget=budget,
            max_tokens=max_tokens if budget is None else max_tokens + budget + len(CLOSES) + 1,
            **options,
        ),
        budget=st.sampled_from([None, None, 0, 2]),
        bad_words=st.sampled_from(BAD_WORDS),
        temperature=st.sampled_from([0.0, 1.0]),
        max_tokens=st.integers(1, 14),
        top_k=st.sampled_from([0, 9]),
        seed=st.integers(0, 3),
        prompt_logprobs=st.sampled_from([False, False, True]),
        raw_logprobs=st.just(True),
        ignore_eos=st.just(True),
    ),
    num_samples=st.sampled_from([1, 1, 2, 3]),
    max_staleness=st.sampled_from([None, None, None, 1]),
)
updates = st.builds(
    Event,
    step=st.integers(1, 22),
    kind=st.just("update"),
    policy=st.sampled_from(typing.get_args(KvPolicy)),
    names=st.sampled_from([0, 0, 1, 4]),
)
pauses = st.builds(
    Event,
    step=st.integers(1, 22),
    kind=st.just("pause"),
    policy=st.sampled_from(typing.get_args(PauseMode)),
)
others = st.builds(
    Event, step=st.integers(1, 22), kind=st.sampled_from(["abort", "sleep", "deep sleep"])
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB))


def change(engine: InferenceEngine, held: dict[int, Weights], event: Event) -> None:
    """Return a new version: some tensors of the next model, or all."""
    newest = max(held)
    names = NAMES if not event.names else NAMES[:: len(NAMES) // event.names][: event.names]
    changed = {name: MODELS[(newest + 1) % len(MODELS)][name] for name in names}
    held[newest + 1] = held[newest] | changed
    engine.update_weights(changed, kv_policy=event.policy)


def happen(engine: InferenceEngine, held: dict[int, Weights], event: Event) -> list[TrainingSample]:
    match event.kind:
        case "update":
            change(engine, held, event)
        case "pause":
            ended = engine.pause(event.policy)
            engine.step()
            engine.resume()
            return ended
        case "abort":  # then resume from the partial sample
            for sample in engine.abort():
                engine.resume_from(sample)
        case _:
            engine.sleep(weights=event.kind == "deep sleep")
            engine.wake()
    return []


def live(
    engine: InferenceEngine, work: list[Ask], events: list[Event]
) -> tuple[list[TrainingSample], dict[int, Weights]]:
    """Run everything. Return the samples and the weights of every version."""
    held: dict[int, Weights] = {0: MODELS[0]}
    samples: list[TrainingSample] = []
    last = max([ask.arrives for ask in work] + [event.step for event in events])
    for step in range(3000):
        if step > last and not engine.has_pending():
            break
        for ask in work:
            if ask.arrives == step:
                engine.add_request(
                    ask.prompt, ask.params, ask.num_samples, max_staleness=ask.max_staleness
                )
        for event in events:
            if event.step == step:
                samples += happen(engine, held, event)
        poison(engine)
        samples += engine.step()
        engine.loop.check()
    else:
        raise AssertionError("livelock")
    return samples, held


def check(
    model: Path, dtype: str, work: list[Ask], events: list[Event], schedule: Schedule
) -> None:
    if schedule.num_blocks is not None:
        longest = max(len(ask.prompt) + ask.params.max_tokens for ask in work)
        schedule = replace(schedule, num_blocks=-(-longest // schedule.block_size) + 2)
    with (
        threads_restored(),
        InferenceEngine(schedule.config(model, dtype, bytes_per_token(dtype, schedule))) as engine,
    ):
        samples, held = live(engine, work, events)
        assert engine.get_weight_version() == max(held)
        assert "previous" not in engine.runner.models
        replayer = Replayer(engine, held)
        for sample in samples:
            length = len(sample.completion_tokens)
            assert (
                len(sample.logprobs)
                == len(sample.loss_mask)
                == len(sample.raw_logprobs or ())
                == length
            )
            assert [
                i for e in sample.kv_versions for i in range(e.token_start, e.token_end)
            ] == list(range(length))
            if length:
                assert differences(sample, replayer.replay(sample)) == ()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(
    max_examples=at_depth(15),
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(
    work=st.lists(asks, min_size=1, max_size=5),
    events=st.lists(st.one_of(updates, updates, updates, pauses, others), min_size=1, max_size=6),
    schedule=schedules_and_codes,
)
def test_replay_reproduces_every_sample(
    model: Path, dtype: str, backend: Any, work: list[Ask], events: list[Event], schedule: Schedule
) -> None:
    check(model, dtype, work, events, on(backend, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=at_depth(150), deadline=None, suppress_health_check=[*HealthCheck])
@given(
    work=st.lists(asks, min_size=1, max_size=5),
    events=st.lists(st.one_of(updates, updates, updates, pauses, others), min_size=1, max_size=6),
    schedule=schedules_and_codes,
)
def test_replay_reproduces_every_sample_in_many_lives(
    model: Path, backend: Any, work: list[Ask], events: list[Event], schedule: Schedule
) -> None:
    check(model, "bfloat16", work, events, on(backend, schedule))


@pytest.mark.thorough(but=["radix-1"])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_keep_policy_works_at_every_token(model: Path, cache_type: Any, lookahead: int) -> None:
    """Old tokens come from the old model on its keys. New tokens come from the new model on keys of
    both.
    """
    cuts: set[int] = set()
    length, prompt = 8, STEM[:21]
    schedule = Schedule(block_size=4, cache_type=cache_type, lookahead=lookahead, num_threads=1)
    params = SamplingParams(max_tokens=length, seed=3, ignore_eos=True)
    with threads_restored():
        for steps in range(length + 2):
            with InferenceEngine(schedule.config(model, "float32", VALUES_PER_TOKEN * 4)) as engine:
                old = engine.generate(prompt, params)[0]
                engine.add_request(prompt, params)
                samples = [sample for _ in range(steps) for sample in engine.step()]
                engine.update_weights(MODELS[1], kv_policy="keep")
                while engine.has_pending():
                    samples += engine.step()
                (sample,) = samples
                cut = sample.weight_versions[0].end if sample.weight_versions[0].version == 0 else 0
                cuts.add(cut)
                assert sample.completion_tokens[:cut] == old.completion_tokens[:cut]
                assert sample.logprobs[:cut] == old.logprobs[:cut]
                if 0 < cut < length:
                    assert sample.logprobs[cut:] != old.logprobs[cut:]
                    first, second = sample.kv_versions[-1].versions
                    assert (first.version, first.start, first.end) == (0, 0, len(prompt) + cut - 1)
                    assert (second.version, second.end) == (1, len(prompt) + length - 1)
                assert (
                    differences(
                        sample, Replayer(engine, {0: MODELS[0], 1: MODELS[1]}).replay(sample)
                    )
                    == ()
                )
    assert cuts >= set(range(1, length + 1))


def test_scenario_covers_the_version_changes(model: Path) -> None:
    """Wrong versions in a sample are detected."""
    schedule = Schedule(block_size=4, num_threads=1)
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    with (
        threads_restored(),
        InferenceEngine(schedule.config(model, "float32", VALUES_PER_TOKEN * 4)) as engine,
    ):
        engine.add_request(STEM[:21], params)
        for _ in range(4):
            engine.step()
        engine.update_weights(MODELS[1], kv_policy="keep")
        samples: list[TrainingSample] = []
        while engine.has_pending():
            samples += engine.step()
        first, second = samples[0].kv_versions
        replayer = Replayer(engine, {0: MODELS[0], 1: MODELS[1]})
        shifted = (
            replace(second.versions[0], end=second.versions[0].end - 1),
            replace(second.versions[1], start=second.versions[1].start - 1),
        )
        lie = replace(samples[0], kv_versions=(first, second._replace(versions=shifted)))
        assert differences(samples[0], replayer.replay(samples[0])) == ()
        assert differences(lie, replayer.replay(lie)) != ()
