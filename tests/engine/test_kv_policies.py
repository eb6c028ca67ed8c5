"""Running requests during an update: every policy, at every token, on both caches, with and without
lookahead.

Tokens before the update come from the old model. Later tokens match the policy's promise bit for
bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import (
    ContextVersions,
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
    VersionSpan,
    WeightUpdateError,
)
from nano_inference.config import CacheType
from nano_inference.rl import score
from nano_inference.types import Delta, KvPolicy
from tests.models.tiny import llama_config, tiny_llama, write_model
from tests.weights.weight_cases import NEW, NEWER, OLD, PROMPT, Build, drain

LENGTH = 9
SEED = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    old = tiny_llama(tmp_path_factory.mktemp("old"), seed=0)
    return [old, write_model(tmp_path_factory.mktemp("new"), llama_config(), NEW)]


def drawn(max_tokens: int = LENGTH, seed: int = SEED) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def bits(sample: TrainingSample, start: int = 0, end: int | None = None) -> tuple[Any, ...]:
    return sample.completion_tokens[start:end], sample.logprobs[start:end]


def alone(build: Build, which: int, tokens: list[int], max_tokens: int = LENGTH) -> TrainingSample:
    """Return the sample of the old (0) or new (1) model, without other requests."""
    return build((OLD, NEW)[which]).generate(tokens, drawn(max_tokens))[0]


def split(sample: TrainingSample) -> int:
    """Return the position of the version change, or the sample's length."""
    return sample.weight_versions[0].end if sample.weight_versions else 0


# -- every policy at every token -------------------------------------------------------------------

POLICIES: list[KvPolicy] = ["recompute", "abort", "wait", "finish_old"]
CASES = [(cache, lookahead) for cache in ("paged", "radix") for lookahead in (0, 1)]


@pytest.fixture(scope="module")
def stops(folders: list[Path]) -> dict[str, Any]:
    """Return old and new samples of the prompt, and for each cut the new model's continuation of
    the old tokens.
    """
    with InferenceEngine(EngineConfig(model_path=str(folders[0]), kv_cache_memory=2**20)) as engine:
        old = engine.generate(PROMPT, drawn())[0]
    with InferenceEngine(EngineConfig(model_path=str(folders[1]), kv_cache_memory=2**20)) as engine:
        new = engine.generate(PROMPT, drawn())[0]
        after = {
            cut: bits(
                engine.generate([*PROMPT, *old.completion_tokens[:cut]], drawn(LENGTH - cut))[0]
            )
            for cut in range(LENGTH)
        }
    return {"old": old, "new": new, "after": after}


@pytest.mark.thorough(
    cases=[f"{policy}-{each}" for policy in POLICIES for each in ("paged-0", "radix-1")]
)
@pytest.mark.parametrize(("cache", "lookahead"), CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_update_at_every_token(
    build: Build, stops: dict[str, Any], policy: KvPolicy, cache: CacheType, lookahead: int
) -> None:
    cuts: set[int] = set()
    for steps in range(LENGTH + 3):
        engine = build(cache_type=cache, lookahead=lookahead)
        engine.add_request(PROMPT, drawn())
        samples = [sample for _ in range(steps) for sample in engine.step()]
        update = engine.update_weights(NEW, kv_policy=policy)
        engine.add_request(PROMPT, drawn())  # the same request, added later
        samples += drain(engine)
        assert update.done()
        first, second = sorted(samples, key=lambda s: s.request_id)
        cuts.add(cut := split(first))
        check_first(engine, first, stops, policy, cut)
        assert bits(second) == bits(stops["new"]), (
            "a newcomer after the update is the new model's alone"
        )
        assert second.weight_versions == (VersionSpan(1, 0, LENGTH),)
        assert "previous" not in engine.runner.models
        engine.shutdown()
    assert cuts >= (set(range(1, LENGTH + 1)) if policy in ("recompute", "abort") else {LENGTH})


def check_first(
    engine: InferenceEngine,
    sample: TrainingSample,
    stops: dict[str, Any],
    policy: KvPolicy,
    cut: int,
) -> None:
    """Check the request that ran before the update."""
    version = sample.weight_versions[0].version
    if version == 1:  # the request had not started, or had sampled nothing
        assert bits(sample) == bits(stops["new"])
        assert sample.kv_versions == (
            ContextVersions(0, LENGTH, (VersionSpan(1, 0, len(PROMPT) + LENGTH - 1),)),
        )
        return
    assert bits(sample, 0, cut) == bits(stops["old"], 0, cut), (
        "what stood before is the old model's"
    )
    before = ContextVersions(0, cut, (VersionSpan(0, 0, len(PROMPT) + cut - 1),))
    if policy == "recompute":
        assert bits(sample, cut) == stops["after"].get(cut, ((), ()))
        after = ContextVersions(cut, LENGTH, (VersionSpan(1, 0, len(PROMPT) + LENGTH - 1),))
        assert sample.kv_versions == ((before, after) if cut < LENGTH else (before,))
        assert sample.oldest_weight_version == 0
    else:
        assert len(sample.weight_versions) == 1
        assert sample.kv_versions == (before,)
    if policy == "abort" and cut < LENGTH:
        assert sample.finish_reason == "abort"
        assert len(sample.completion_tokens) == len(sample.logprobs) == len(sample.loss_mask) == cut
        engine.resume_from(sample)
        (resumed,) = drain(engine)
        assert bits(resumed, cut) == stops["after"][cut], "not continued under the live weights"
        assert resumed.kv_versions[-1].token_start == cut
    elif policy in ("wait", "finish_old"):
        assert bits(sample) == bits(stops["old"])
        assert sample.finish_reason == "length"


# -- finish_old ------------------------------------------------------------------------------------


def test_new_request_finishes_while_an_old_request_continues(
    build: Build, stops: dict[str, Any]
) -> None:
    engine = build()
    before = {name: tensor.data_ptr() for name, tensor in engine.model.params.items()}
    old = engine.add_request(PROMPT, drawn(40))
    for _ in range(5):
        engine.step()
    assert engine.update_weights(NEW, kv_policy="finish_old").done()
    assert engine.get_weight_version() == 1
    engine.add_request(PROMPT, drawn())
    samples = drain(engine)
    assert [s.request_id for s in samples] == [old, old + 1]
    assert bits(samples[1]) == bits(stops["new"])
    assert bits(samples[0]) == bits(alone(build, 0, PROMPT, 40))
    assert {name: tensor.data_ptr() for name, tensor in engine.model.params.items()} == before, (
        "in place"
    )


def test_finish_old_copies_only_changed_tensors(build: Build) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn(30))
    engine.step()
    name = "model.layers.1.mlp.up_proj.weight"
    engine.update_weights({name: NEW[name]}, kv_policy="finish_old")
    old, new = engine.runner.models["previous"].params, engine.model.params
    assert {key for key in new if old[key] is not new[key]} == {"layers.1.gate_up"}
    # A later update of other tensors must not reach requests that finish on the old weights.
    engine.update_weights({"model.norm.weight": NEW["model.norm.weight"]}, kv_policy="keep")
    assert {key for key in new if engine.runner.models["previous"].params[key] is not new[key]} == {
        "layers.1.gate_up",
        "norm",
    }
    (sample,) = drain(engine)
    assert bits(sample) == bits(alone(build, 0, PROMPT, 30))


def test_second_finish_old_waits_for_finishing_requests(build: Build) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn(20))
    engine.step()
    first = engine.update_weights(NEW, kv_policy="finish_old")
    engine.add_request(PROMPT, drawn(12))
    engine.step()
    second = engine.update_weights(NEWER, kv_policy="finish_old")
    assert first.done()
    assert not second.done()
    third = engine.update_weights(OLD, kv_policy="keep")
    assert not third.done(), "updates are in order"
    samples = drain(engine)
    assert second.done()
    assert third.done()
    assert engine.get_weight_version() == 3
    assert bits(samples[0]) == bits(alone(build, 0, PROMPT, 20))
    assert bits(samples[1]) == bits(alone(build, 1, PROMPT, 12)), (
        "the update waited longer than it ran"
    )


def test_cache_never_mixes_old_and_new_versions(build: Build, stops: dict[str, Any]) -> None:
    """Both requests lose their blocks and recompute the same prompt in one step."""
    engine = build()
    engine.add_request(PROMPT, drawn())
    for _ in range(3):
        engine.step()
    engine.update_weights(NEW, kv_policy="finish_old")
    engine.add_request(PROMPT, drawn())
    engine.step()
    engine.sleep()
    engine.wake()
    old, new = drain(engine)
    assert bits(old) == bits(stops["old"])
    assert bits(new) == bits(stops["new"])


def test_group_finishes_on_the_old_weights(build: Build) -> None:
    engine = build(max_tokens_per_batch=8)
    engine.add_request(PROMPT, drawn(), num_samples=3)
    engine.step()  # part of the prompt
    engine.update_weights(NEW, kv_policy="finish_old")
    samples = drain(engine)
    expected = build().generate(PROMPT, drawn(), 3)
    assert [bits(s) for s in samples] == [bits(s) for s in expected]
    assert {s.weight_version for s in samples} == {0}


def test_update_fails_without_memory_for_the_old_weights(
    build: Build, monkeypatch: pytest.MonkeyPatch, stops: dict[str, Any]
) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn())
    engine.step()
    checksum = engine.weights_checksum()

    def refuse(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "set_aside", refuse)
        update = engine.update_weights(NEW, kv_policy="finish_old")
        with pytest.raises(WeightUpdateError, match="no memory"):
            update.result(1)
    assert engine.weights_checksum() == checksum
    assert engine.get_weight_version() == 0
    assert bits(drain(engine)[0]) == bits(stops["old"])
    engine.update_weights(NEW, blocking=True)
    assert bits(engine.generate(PROMPT, drawn())[0]) == bits(stops["new"])


def test_dependent_update_fails_with_the_failed_update(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn(20))
    engine.step()
    engine.update_weights(NEW, kv_policy="finish_old")
    engine.add_request(PROMPT, drawn(30))
    engine.step()
    refused = engine.update_weights(NEWER, kv_policy="finish_old")  # waits for `previous`
    norm = {"model.norm.weight": OLD["model.norm.weight"]}
    follows = engine.update_weights(norm, kv_policy="finish_old")
    follows_too = engine.update_weights(
        [[("model.norm.weight", torch.tensor([0]), torch.tensor([2.0]))]]
    )
    whole = engine.update_weights(OLD)
    partial = engine.update_weights(norm)

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(engine.runner, "set_aside", fail)
    drain(engine)
    assert "no memory" in str(refused.error)
    for update in (follows, follows_too):
        with pytest.raises(WeightUpdateError, match="version 2 failed, and this one builds on it"):
            update.result(0)
    assert (whole.result(0), partial.result(0)) == (5, 6)
    assert engine.get_weight_version() == 6
    assert not engine.weight_sync.pending
    assert "previous" not in engine.runner.models
    checksum = engine.weights_checksum()
    engine.update_weights(OLD, blocking=True)
    assert engine.weights_checksum() == checksum


# -- requested versions ----------------------------------------------------------------------------


def test_request_waits_for_its_version(build: Build, stops: dict[str, Any]) -> None:
    engine = build()
    held = engine.add_request(PROMPT, drawn(), min_version=2)
    other = engine.add_request(PROMPT, drawn())
    assert [s.request_id for s in drain(engine)] == [other]
    assert engine.stats().num_held == 1
    assert not engine.has_pending(), "a loop over has_pending must end"
    engine.update_weights(NEWER, blocking=True)
    assert not engine.has_pending()
    engine.update_weights(NEW, blocking=True)
    (sample,) = drain(engine)
    assert sample.request_id == held
    assert bits(sample) == bits(stops["new"])
    assert engine.stats().num_held == 0


def test_held_request_can_be_aborted(build: Build) -> None:
    engine = build()
    held = engine.add_request(PROMPT, drawn(), min_version=7)
    (sample,) = engine.abort(held)
    assert sample.completion_tokens == ()
    assert sample.finish_reason == "abort"
    assert not engine.loop.sequences.held


@pytest.mark.parametrize("policy", ["keep", "recompute", "finish_old"])
def test_stale_request_ends_with_its_partial_sample(build: Build, policy: KvPolicy) -> None:
    engine = build()
    strict = engine.add_request(PROMPT, drawn(30), max_staleness=1)
    engine.add_request(PROMPT, drawn(30))
    fresh = engine.add_request(PROMPT, drawn(30), max_staleness=0, min_version=2)
    for _ in range(4):
        engine.step()
    engine.update_weights(NEW, kv_policy="keep")
    engine.step()
    assert engine.loop.sequences.of_requests(frozenset([strict])), "one version behind is allowed"
    engine.update_weights(NEWER, kv_policy=policy)
    samples = drain(engine)
    ended = {s.request_id: s for s in samples}
    assert ended[strict].finish_reason == "abort"
    assert ended[strict].stop_reason == "exceeds max_staleness"
    assert 4 <= len(ended[strict].completion_tokens) < 30
    assert len(ended[strict].logprobs) == len(ended[strict].completion_tokens)
    assert [ended[i].finish_reason for i in (strict + 1, fresh)] == ["length", "length"]
    assert ended[fresh].oldest_weight_version == 2


@pytest.mark.parametrize(
    ("name", "value"), [("min_version", -1), ("min_version", 1.5), ("max_staleness", "2")]
)
def test_version_limits_must_be_integers(build: Build, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        build().add_request(PROMPT, drawn(), **{name: value})


# -- blocking and invalid arguments ----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "keep", "abort", "wait", "finish_old"])
def test_blocking_update_is_live_when_it_returns(build: Build, policy: KvPolicy) -> None:
    engine = build(lookahead=1)
    engine.add_request(PROMPT, drawn(20))
    for _ in range(3):
        engine.step()
    update = engine.update_weights(NEW, blocking=True, kv_policy=policy)
    assert update.done()
    assert engine.get_weight_version() == 1
    (sample,) = drain(engine)
    assert len(sample.completion_tokens) == 20 or policy == "abort"


def test_new_request_waits_for_a_waiting_update(build: Build, stops: dict[str, Any]) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn(15))
    engine.step()
    update = engine.update_weights(NEW, kv_policy="wait")
    assert not update.done()
    engine.add_request(PROMPT, drawn())
    engine.step()
    assert engine.stats().num_held == 1
    samples = drain(engine)
    assert bits(samples[0]) == bits(alone(build, 0, PROMPT, 15))
    assert bits(samples[1]) == bits(stops["new"])


def test_unknown_policy_is_an_error(build: Build) -> None:
    engine = build()
    with pytest.raises(
        WeightUpdateError, match="'retract' must be one of recompute, keep, abort, wait, finish_old"
    ):
        engine.update_weights(NEW, kv_policy="retract")
    assert engine.get_weight_version() == 0


# -- several updates -------------------------------------------------------------------------------


def test_held_request_continues_after_a_failed_update(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn(40))
    engine.step()
    engine.update_weights(NEW, kv_policy="finish_old")
    engine.add_request(PROMPT, drawn(5))
    engine.step()
    update = engine.update_weights(NEWER, kv_policy="wait")
    held = engine.add_request(PROMPT, drawn())
    other = engine.add_request(PROMPT, drawn(), min_version=2)
    engine.step()
    assert engine.stats().num_held == 2

    def refuse(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "set_aside", refuse)
        samples = drain(engine)
    with pytest.raises(WeightUpdateError, match="no memory"):
        update.result(0)
    assert held in {s.request_id for s in samples}
    assert {seq.request_id for seq in engine.loop.sequences.held} == {other}, (
        "its version may yet come"
    )


def test_held_request_has_not_started(build: Build) -> None:
    """If it had started, it would run on the old weights, the next update would wait for it, and it
    would wait for the update after that: a deadlock.
    """
    engine = build()
    engine.add_request(PROMPT, drawn())
    engine.step()
    (partial,) = engine.abort()
    engine.add_request(PROMPT, drawn(30))
    engine.step()
    updates = [engine.update_weights(NEW, kv_policy="finish_old")]
    engine.add_request(PROMPT, drawn(5))
    engine.step()
    updates.append(engine.update_weights(NEWER, kv_policy="finish_old"))
    updates.append(engine.update_weights(OLD, kv_policy="finish_old"))
    updates.append(engine.update_weights(NEW, kv_policy="wait"))
    resumed = engine.resume_from(partial)
    samples = drain(engine)
    assert all(update.done() for update in updates)
    assert [span.version for span in samples[-1].weight_versions] == [0, 4]
    assert samples[-1].request_id == resumed


def test_resume_from_rejects_a_version_being_replaced(build: Build) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn(20))
    for _ in range(4):
        engine.step()
    (partial,) = engine.abort()
    engine.add_request(PROMPT, drawn(20))
    engine.step()
    engine.update_weights(NEW, kv_policy="wait")
    with pytest.raises(InvalidRequest, match="version 0 is being replaced"):
        engine.resume_from(partial, version=0)
    engine.resume_from(partial)
    assert [span.version for span in drain(engine)[-1].weight_versions] == [0, 1]


@pytest.mark.parametrize("how", ["preempted", "resumed"])
def test_prompt_logprobs_match_the_versions_of_the_sample(build: Build, how: str) -> None:
    engine = build(max_tokens_per_batch=8)
    params = SamplingParams(max_tokens=4, seed=SEED, ignore_eos=True, prompt_logprobs=True)
    expected = build(NEW).generate(PROMPT, params)[0]
    engine.add_request(PROMPT, params)
    engine.step()
    if how == "preempted":
        engine.update_weights(NEW, kv_policy="keep")
        engine.step()
        engine.sleep()
        engine.wake()
    else:
        (partial,) = engine.abort()
        engine.update_weights(NEW)
        engine.resume_from(partial)
    (sample,) = drain(engine)
    assert [span.version for entry in sample.kv_versions for span in entry.versions] == [1]
    assert bits(sample) == bits(expected)
    assert repr(sample.prompt_logprobs) == repr(expected.prompt_logprobs)


def test_abort_policy_returns_only_its_own_samples(build: Build) -> None:
    """The abort applies an update, which also retires other requests' steps in flight."""
    engine = build(lookahead=1)
    old = engine.add_request(PROMPT, drawn(40))
    engine.step()
    engine.update_weights(NEW, kv_policy="finish_old")
    other = engine.add_request(PROMPT, drawn(2))
    engine.step()
    engine.step()
    engine.update_weights(NEWER, kv_policy="finish_old")
    assert [s.request_id for s in engine.abort(old)] == [old]
    assert [s.request_id for s in drain(engine)] == [other]


def test_aborting_update_spares_scores(build: Build) -> None:
    engine = build(max_tokens_per_batch=8)
    expected = score(build(NEW), [PROMPT])[0]
    partial = engine.add_request(PROMPT, drawn())
    for _ in range(6):
        engine.step()
    steps, step = [0], engine.loop.step

    def step_and_update() -> list[TrainingSample]:
        steps[0] += 1
        if steps[0] == 2:
            engine.update_weights(NEW, kv_policy="abort")
        return step()

    engine.loop.step = step_and_update
    assert repr(score(engine, [PROMPT])[0]) == repr(expected)
    (sample,) = drain(engine)
    assert (sample.request_id, sample.finish_reason) == (partial, "abort")


@pytest.mark.parametrize("limit", [1, 2])
def test_staleness_counts_only_versions_that_were_used(build: Build, limit: int) -> None:
    engine = build(max_tokens_per_batch=8)
    request = engine.add_request(PROMPT, drawn(20), max_staleness=limit)
    engine.step()  # part of the prompt
    engine.update_weights(NEW, kv_policy="keep")
    if limit == 2:  # some token attends to keys of version 0
        while not engine.loop.sequences.of_requests(frozenset([request]))[0].num_completion_tokens:
            engine.step()
    engine.update_weights(NEWER, kv_policy="recompute")
    engine.step()
    assert engine.loop.sequences.of_requests(frozenset([request])), (
        "nothing is left of version 0, or it is allowed"
    )
    engine.update_weights(OLD, kv_policy="recompute")
    (sample,) = drain(engine)
    assert sample.stop_reason == ("exceeds max_staleness" if limit == 2 else None)


def test_resumed_sample_keeps_its_staleness(build: Build) -> None:
    engine = build(max_tokens_per_batch=8)
    engine.add_request(PROMPT, drawn(30))
    engine.step()  # part of the prompt
    engine.update_weights(NEW, kv_policy="keep")
    for _ in range(6):
        engine.step()
    (partial,) = engine.abort()
    assert [span.version for span in partial.weight_versions] == [1]
    deltas: list[Delta] = []
    again = engine.intake.new_request_id()
    engine.resume_many([partial], deltas.append, stream=False, request_id=again, max_staleness=1)
    engine.step()
    engine.update_weights(NEWER, kv_policy="keep")
    assert drain(engine) == []
    (sample,) = [delta.finished for delta in deltas if delta.finished]
    assert sample.stop_reason == "exceeds max_staleness"
    assert min(span.version for entry in sample.kv_versions for span in entry.versions) == 0
