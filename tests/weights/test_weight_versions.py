"""Weight updates during generation: versions of sampled tokens, and no stale keys or values."""

import pytest

from nano_inference import (
    InferenceEngine,
    TrainingSample,
    VersionSpan,
    WeightUpdateError,
)
from tests.weights.weight_cases import (
    NEW,
    NEWER,
    OLD,
    PROMPT,
    Build,
    assert_holds,
    bits,
    drain,
    drawn,
    greedy,
)


def test_update_is_live_immediately_if_idle(build: Build) -> None:
    engine = build(lookahead=0)
    engine.add_request(PROMPT, drawn())
    engine.step()
    update = engine.update_weights(NEW)
    assert update.done()
    assert engine.get_weight_version() == 1


def test_update_is_live_from_the_step_after_those_in_flight(build: Build) -> None:
    engine = build(lookahead=1)
    engine.add_request(PROMPT, drawn())
    engine.step()
    engine.step()
    update = engine.update_weights(NEW)
    assert not update.done()
    assert engine.get_weight_version() == 0
    with pytest.raises(WeightUpdateError, match=r"not applied within 0\.01 s"):
        update.result(timeout=0.01)
    assert_holds(engine, OLD)
    engine.step()
    assert update.done()
    assert update.result(0) == 1
    assert_holds(engine, NEW)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_spans_map_tokens_to_versions(build: Build, blocking: bool, lookahead: int) -> None:
    engine = build(lookahead=lookahead)
    request = engine.add_request(PROMPT, drawn(20), 3)
    samples: list[TrainingSample] = []
    versions = {3: NEW, 8: NEWER, 13: OLD}
    for step in range(15):
        if step in versions:
            engine.update_weights(versions[step], blocking=blocking)
        samples += engine.step()
        engine.loop.check()
    samples += drain(engine)
    assert [s.request_id for s in samples] == [request] * 3
    for sample in samples:
        spans = sample.weight_versions
        assert [span.version for span in spans] == [0, 1, 2, 3]
        assert [p for span in spans for p in range(span.start, span.end)] == list(range(20))
        assert sample.weight_version == 3
        # Tokens of version 0 equal those of an engine of that version.
        first = build().generate(PROMPT, drawn(20), 3)[sample.sample_index]
        end = spans[0].end
        assert sample.completion_tokens[:end] == first.completion_tokens[:end]
        assert sample.logprobs[:end] == first.logprobs[:end]


def test_version_that_sampled_nothing_has_no_span(build: Build) -> None:
    engine = build(lookahead=0)
    engine.add_request(PROMPT, drawn(4))
    engine.step()
    engine.update_weights(NEW)
    engine.update_weights(NEWER)
    assert drain(engine)[0].weight_versions == (VersionSpan(0, 0, 1), VersionSpan(2, 1, 4))
    engine.add_request(PROMPT, drawn(4))
    engine.update_weights(OLD)
    assert drain(engine)[0].weight_versions == (VersionSpan(3, 0, 4),)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_blocking_update_makes_running_requests_recompute(build: Build, lookahead: int) -> None:
    """Later tokens equal a fresh engine's continuation of the prompt and the tokens so far."""
    engine = build(lookahead=lookahead)
    engine.add_request(PROMPT, greedy(14), 2)
    engine.add_request(PROMPT[:7], greedy(14))
    for _ in range(6):
        engine.step()
    engine.update_weights(NEW, blocking=True)
    assert engine.get_weight_version() == 1
    fresh = build(NEW)
    for sample in drain(engine):
        (old, new) = sample.weight_versions
        assert (old.version, new.version, new.end) == (0, 1, 14)
        so_far = [*sample.prompt_tokens, *sample.completion_tokens[: new.start]]
        (expected,) = fresh.generate(so_far, greedy(14 - new.start))
        assert sample.completion_tokens[new.start :] == expected.completion_tokens
        assert sample.logprobs[new.start :] == expected.logprobs


def test_non_blocking_update_keeps_cached_keys(
    build: Build,
) -> None:
    """The next token attends to old keys of the prompt under new weights: neither engine by itself
    gives it.
    """
    engine = build(lookahead=0)
    engine.add_request(PROMPT, greedy(8))
    for _ in range(3):
        engine.step()
    computed = engine.stats().tokens_computed
    engine.update_weights(NEW)
    (sample,) = drain(engine)
    assert engine.stats().tokens_computed - computed == 5
    so_far = [*PROMPT, *sample.completion_tokens[:3]]
    (recomputed,) = build(NEW).generate(so_far, greedy(5))
    assert sample.logprobs[3] != recomputed.logprobs[0]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("running", [0, 1, 4])
def test_stale_keys_do_not_reach_later_requests(
    build: Build, blocking: bool, lookahead: int, running: int
) -> None:
    """Cover requests before, during and after: the prompt is cached under the old weights, and its
    owner may still be running.
    """
    expected_old, expected_new = (
        build(weights).generate(PROMPT, greedy())[0] for weights in (OLD, NEW)
    )
    engine = build(lookahead=lookahead)
    for _ in range(2):
        assert bits(engine.generate(PROMPT, greedy())[0]) == bits(expected_old)
    engine.add_request([*PROMPT, 7], greedy(30))
    for _ in range(running):
        engine.step()
    engine.update_weights(NEW, blocking=blocking)
    waiting = engine.add_request(PROMPT, greedy())
    first = engine.generate(PROMPT, greedy())[0]
    second = engine.generate(PROMPT, greedy())[0]
    rest = {s.request_id: s for s in drain(engine)}
    for sample in (first, second, rest[waiting]):
        assert bits(sample) == bits(expected_new)
        assert sample.weight_versions == (VersionSpan(1, 0, 8),)
    assert second.cached_tokens == 20  # the new blocks are shared again


def test_request_that_waits_starts_under_the_new_weights(build: Build) -> None:
    engine = build(max_batch_size=1)
    engine.add_request([5, 6], greedy(6))
    waiting = engine.add_request(PROMPT, greedy())
    engine.step()
    engine.update_weights(NEW)
    sample = next(s for s in drain(engine) if s.request_id == waiting)
    assert bits(sample) == bits(build(NEW).generate(PROMPT, greedy())[0])


def test_rollback_does_not_restore_old_blocks(build: Build) -> None:
    engine = build()
    (before,) = engine.generate(PROMPT, greedy())
    engine.update_weights(NEW)
    engine.update_weights(OLD)
    (after,) = engine.generate(PROMPT, greedy())
    assert after.cached_tokens == 0
    assert bits(after) == bits(before)


def test_blocks_of_a_dead_version_are_all_free(build: Build) -> None:
    engine = build()
    engine.generate([PROMPT, PROMPT[::-1]], greedy(), 3)
    engine.add_request(PROMPT, greedy())
    engine.step()
    engine.update_weights(NEW, blocking=True)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    engine.loop.check()
    drain(engine)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def named_versions(engine: InferenceEngine) -> set[int]:
    """Return the weight versions of matchable blocks."""
    return {block.namespace.version for block in engine.cache.blocks if block.namespace is not None}


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
@pytest.mark.parametrize("blocking", [False, True])
def test_blocks_lose_the_names_of_dead_versions(
    build: Build, blocking: bool, cache_type: str
) -> None:
    """No block gets such a name either: a request that continues with old keys names no blocks."""
    engine = build(max_batch_size=2, cache_type=cache_type)
    engine.generate(PROMPT[::-1], greedy())
    for prompt in (PROMPT, PROMPT[3:], PROMPT[5:]):  # two running, one waiting
        engine.add_request(prompt, greedy(20))
    engine.step()
    engine.step()
    assert named_versions(engine) == {0}
    engine.update_weights(NEW, blocking=blocking)
    assert named_versions(engine) == set()
    for _ in range(10):
        engine.step()
        assert named_versions(engine) <= {1}
    drain(engine)
    assert named_versions(engine) == {1}


def test_waiting_request_shares_blocks_under_the_new_version(build: Build) -> None:
    engine = build(max_batch_size=1)
    engine.add_request([5, 6], greedy(3))
    engine.add_request(PROMPT, greedy())
    engine.step()
    engine.update_weights(NEW)
    drain(engine)
    (again,) = engine.generate(PROMPT, greedy())
    assert again.cached_tokens == 20
    assert bits(again) == bits(build(NEW).generate(PROMPT, greedy())[0])


def test_aborted_sample_carries_the_version_of_its_last_token(build: Build) -> None:
    engine = build(max_batch_size=1, lookahead=0)
    engine.add_request(PROMPT, greedy())
    engine.add_request([5, 6], greedy())
    engine.step()
    engine.update_weights(NEW)
    begun, untouched = engine.abort()
    assert (begun.weight_version, begun.weight_versions) == (0, (VersionSpan(0, 0, 1),))
    # no token: the live version
    assert (untouched.weight_version, untouched.weight_versions) == (1, ())
