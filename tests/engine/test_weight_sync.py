"""New weights for a live engine: in place, versioned, all or nothing, and never with stale keys and values."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    SamplingParams,
    TrainingSample,
    VersionSpan,
    WeightSyncManager,
    WeightUpdate,
    WeightUpdateError,
)
from nano_inference.models.weights import param_table, read, slots
from tests.models.tiny import Weights, llama_config, llama_weights, tiny_llama, write_model

Build = Callable[..., InferenceEngine]

OLD, NEW, NEWER = (llama_weights(llama_config(), seed=seed) for seed in (0, 1, 2))
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"
PROMPT = list(range(40, 61))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture
def build(model: Path, tmp_path: Path) -> Iterator[Build]:
    """Engines on the old weights, or on any others given as `weights`."""
    threads, engines = torch.get_num_threads(), list[InferenceEngine]()

    def make(weights: Weights | None = None, **options: Any) -> InferenceEngine:
        folder = model
        if weights is not None:
            folder = write_model(tmp_path / f"model{len(engines)}", llama_config(), weights)
        settled = {"model_path": str(folder), "num_threads": 1, "kv_cache_memory": 2**20, "seed": 0, "block_size": 4}
        engines.append(InferenceEngine(EngineConfig(**(settled | options))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
    torch.set_num_threads(threads)


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def drawn(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)


def bits(sample: TrainingSample) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return sample.completion_tokens, sample.logprobs


def drain(engine: InferenceEngine) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    for _ in range(1000):
        if not engine.has_pending():
            break
        samples += engine.step()
        engine.loop.check()
    assert not engine.has_pending(), "it never ends"
    return sorted(samples, key=lambda s: (s.request_id, s.sample_index))


def current(engine: InferenceEngine) -> Weights:
    """What the engine holds, under checkpoint names."""
    return {
        name: read(engine.model.params, slot).clone() for name, slot in slots(param_table(engine.model.spec)).items()
    }


def assert_holds(engine: InferenceEngine, expected: Mapping[str, Tensor]) -> None:
    held = current(engine)
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [False, True])
def test_weights_change_in_place_and_the_version_counts(build: Build, blocking: bool) -> None:
    engine = build()
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in engine.model.params.items()}
    for version, weights in enumerate([NEW, NEWER, OLD], start=1):
        update = engine.update_weights(weights, blocking=blocking)
        assert update.done()
        assert update.result(0) == update.version == engine.get_weight_version() == version
        assert_holds(engine, weights)
    assert {name: (id(t), t.data_ptr()) for name, t in engine.model.params.items()} == before


@pytest.mark.parametrize("names", [[NORM], [UP], [HEAD, EMBEDDING], ["model.layers.0.self_attn.k_proj.weight"]])
def test_a_partial_state_dict_changes_what_it_names(build: Build, names: list[str]) -> None:
    engine = build()
    engine.update_weights({name: NEW[name] for name in names})
    assert_holds(engine, OLD | {name: NEW[name] for name in names})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floating_dtypes_are_cast(build: Build, dtype: torch.dtype) -> None:
    engine = build()
    given = {name: tensor.to(dtype) for name, tensor in NEW.items()}
    engine.update_weights(given)
    assert_holds(engine, given)


def test_parameters_of_a_trainer_and_strided_tensors_will_do(build: Build) -> None:
    engine = build()
    given = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in NEW.items()}
    engine.update_weights({**given, UP: NEW[UP].T.contiguous().T})
    assert_holds(engine, NEW)
    assert not any(read(engine.model.params, slot).requires_grad for slot in slots(param_table(engine.spec)).values())


def test_the_callers_tensors_stay_the_callers(build: Build) -> None:
    engine = build()
    given = {name: tensor.clone() for name, tensor in NEW.items()}
    engine.update_weights(given, blocking=True)
    for tensor in given.values():
        tensor.zero_()
    assert_holds(engine, NEW)


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Any, str]] = [
    ({}, "non-empty state dict"),
    (None, "non-empty state dict"),
    ([(NORM, torch.ones(64))], "non-empty state dict"),
    ({"norm": torch.ones(64)}, "'norm' is not a tensor of this model"),
    ({"layers.0.qkv": torch.ones(128, 64)}, "names are those of its checkpoint"),
    ({NORM: torch.ones(64), "model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}, "layers.2"),
    ({NORM: torch.ones(65)}, r"'model.norm.weight' has shape \(65,\), expected \(64,\)"),
    ({NORM: torch.ones(1)}, r"shape \(1,\)"),
    ({UP: torch.ones(64, 96)}, r"shape \(64, 96\), expected \(96, 64\)"),
    ({EMBEDDING: torch.ones(301, 64)}, "shape"),
    ({NORM: torch.ones(64, dtype=torch.int64)}, "must be a floating point tensor, not torch.int64"),
    ({NORM: torch.ones(64, dtype=torch.bool)}, "not torch.bool"),
    ({NORM: torch.ones(64, dtype=torch.complex64)}, "not torch.complex64"),
    ({NORM: [1.0] * 64}, "not list"),
    ({NORM: None}, "not NoneType"),
    ({**NEW, NORM: torch.ones(3)}, "shape"),
]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(("weights", "told"), REFUSED)
def test_a_refused_update_leaves_the_old_version_serving(
    build: Build, weights: Any, told: str, blocking: bool, running: bool
) -> None:
    expected = build().generate(PROMPT, drawn())[0]
    engine = build(lookahead=1)
    if running:
        engine.add_request(PROMPT, drawn())
        for _ in range(3):
            engine.step()
    with pytest.raises(WeightUpdateError, match=told):
        engine.update_weights(weights, blocking=blocking)
    assert engine.get_weight_version() == 0
    assert_holds(engine, OLD)
    sample = drain(engine)[0] if running else engine.generate(PROMPT, drawn())[0]
    assert sample.completion_tokens == expected.completion_tokens
    assert sample.logprobs == expected.logprobs
    assert sample.weight_versions == (VersionSpan(0, 0, 8),)
    assert engine.update_weights(NEW, blocking=True).version == 1


@pytest.mark.parametrize("version", [0, -1, 4, 5])
def test_an_explicit_version_must_grow(build: Build, version: int) -> None:
    engine = build()
    assert engine.update_weights(NEW, version=5).version == 5
    with pytest.raises(WeightUpdateError, match=f"version={version} is not newer than 5"):
        engine.update_weights(NEWER, version=version)
    assert_holds(engine, NEW)
    assert engine.update_weights(NEWER).version == 6
    assert engine.get_weight_version() == 6


@pytest.mark.parametrize("version", ["7", 1.5, True, [3]])
def test_a_version_is_an_integer(build: Build, version: Any) -> None:
    engine = build()
    with pytest.raises(WeightUpdateError, match="version"):
        engine.update_weights(NEW, version=version)
    assert_holds(engine, OLD)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "tied", tie=True)


def test_a_tied_head_may_come_along_if_it_is_the_embedding(build: Build, tied: Path) -> None:
    engine = build(model_path=str(tied))
    engine.update_weights({EMBEDDING: NEW[EMBEDDING], HEAD: NEW[EMBEDDING].clone()})
    assert torch.equal(current(engine)[EMBEDDING], NEW[EMBEDDING])
    engine.update_weights({HEAD: NEW[EMBEDDING]})  # equal to what serves
    assert engine.get_weight_version() == 2


@pytest.mark.parametrize(
    "weights",
    [{EMBEDDING: NEW[EMBEDDING], HEAD: NEWER[EMBEDDING]}, {HEAD: NEWER[EMBEDDING]}, {HEAD: NEW[EMBEDDING][:-1]}],
)
def test_a_tied_head_that_differs_is_refused(build: Build, tied: Path, weights: Weights) -> None:
    engine = build(model_path=str(tied))
    before = engine.generate(PROMPT, drawn())[0]
    with pytest.raises(WeightUpdateError, match=HEAD):
        engine.update_weights(weights)
    assert engine.get_weight_version() == 0
    engine.flush_cache()
    assert bits(engine.generate(PROMPT, drawn())[0]) == bits(before)


# -- in the middle of generation ---------------------------------------------------------------------------------------


def test_with_nothing_in_flight_an_update_serves_at_once(build: Build) -> None:
    engine = build(lookahead=0)
    engine.add_request(PROMPT, drawn())
    engine.step()
    update = engine.update_weights(NEW)
    assert update.done()
    assert engine.get_weight_version() == 1


def test_with_a_step_in_flight_it_serves_from_the_next_on(build: Build) -> None:
    engine = build(lookahead=1)
    engine.add_request(PROMPT, drawn())
    engine.step()
    engine.step()
    update = engine.update_weights(NEW)
    assert not update.done()
    assert engine.get_weight_version() == 0
    with pytest.raises(WeightUpdateError, match=r"not applied after 0\.01 s"):
        update.result(timeout=0.01)
    assert_holds(engine, OLD)
    engine.step()
    assert update.done()
    assert update.result(0) == 1
    assert_holds(engine, NEW)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_spans_say_which_version_sampled_which_tokens(build: Build, blocking: bool, lookahead: int) -> None:
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
        # What version 0 sampled is what an engine of that version samples.
        first = build().generate(PROMPT, drawn(20), 3)[sample.sample_index]
        end = spans[0].end
        assert sample.completion_tokens[:end] == first.completion_tokens[:end]
        assert sample.logprobs[:end] == first.logprobs[:end]


def test_a_version_that_sampled_nothing_has_no_span(build: Build) -> None:
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
def test_after_a_blocking_update_running_requests_recompute_their_context(build: Build, lookahead: int) -> None:
    """What follows is what a fresh engine makes of the prompt and the tokens so far."""
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


def test_after_an_update_without_waiting_requests_go_on_with_the_keys_they_have(build: Build) -> None:
    """The next token sees old keys of the prompt and new weights: neither engine alone gives it."""
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
def test_no_stale_keys_reach_a_later_request(build: Build, blocking: bool, lookahead: int, running: int) -> None:
    """Before, while and after: the prompt is cached under the old weights, and its owner may still be running."""
    expected_old, expected_new = (build(weights).generate(PROMPT, greedy())[0] for weights in (OLD, NEW))
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


def test_a_request_that_waits_starts_under_the_new_weights(build: Build) -> None:
    engine = build(max_batch_size=1)
    engine.add_request([5, 6], greedy(6))
    waiting = engine.add_request(PROMPT, greedy())
    engine.step()
    engine.update_weights(NEW)
    sample = next(s for s in drain(engine) if s.request_id == waiting)
    assert bits(sample) == bits(build(NEW).generate(PROMPT, greedy())[0])


def test_going_back_to_old_weights_does_not_bring_old_blocks_back(build: Build) -> None:
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
    """Weight versions of the blocks that can be matched."""
    return {block.namespace.version for block in engine.cache.blocks if block.namespace is not None}


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
@pytest.mark.parametrize("blocking", [False, True])
def test_no_block_keeps_the_name_of_a_dead_version(build: Build, blocking: bool, cache_type: str) -> None:
    """Nor gets one: a request that goes on with old keys names nothing any more."""
    engine = build(max_batch_size=2, cache_type=cache_type)
    engine.generate(PROMPT[::-1], greedy())
    for prompt in (PROMPT, PROMPT[3:], PROMPT[5:]):  # two run, one waits
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


def test_a_request_that_waited_shares_its_blocks_under_the_new_version(build: Build) -> None:
    engine = build(max_batch_size=1)
    engine.add_request([5, 6], greedy(3))
    engine.add_request(PROMPT, greedy())
    engine.step()
    engine.update_weights(NEW)
    drain(engine)
    (again,) = engine.generate(PROMPT, greedy())
    assert again.cached_tokens == 20
    assert bits(again) == bits(build(NEW).generate(PROMPT, greedy())[0])


def test_an_aborted_sample_carries_the_version_of_its_last_token(build: Build) -> None:
    engine = build(max_batch_size=1, lookahead=0)
    engine.add_request(PROMPT, greedy())
    engine.add_request([5, 6], greedy())
    engine.step()
    engine.update_weights(NEW)
    begun, untouched = engine.abort()
    assert (begun.weight_version, begun.weight_versions) == (0, (VersionSpan(0, 0, 1),))
    assert (untouched.weight_version, untouched.weight_versions) == (1, ())  # no token: what serves now


# -- order and ownership -----------------------------------------------------------------------------------------------


def test_what_is_staged_in_flight_is_a_copy(build: Build) -> None:
    engine = build(lookahead=1)
    engine.add_request(PROMPT, greedy())
    engine.step()
    given = {name: tensor.clone() for name, tensor in NEW.items()}
    update = engine.update_weights(given)
    for tensor in given.values():
        tensor.fill_(9.0)
    assert not update.done()
    drain(engine)
    assert_holds(engine, NEW)


def test_updates_are_applied_in_order(build: Build) -> None:
    engine = build(lookahead=1)
    engine.add_request(PROMPT, greedy())
    engine.step()
    first = engine.update_weights(NEW)
    second = engine.update_weights({NORM: NEWER[NORM], UP: NEWER[UP]})
    assert not first.done()
    last = engine.update_weights({UP: OLD[UP]}, blocking=True)
    assert first.done()
    assert second.done()
    assert last.done()
    assert [first.version, second.version, last.version] == [1, 2, 3]
    assert_holds(engine, NEW | {NORM: NEWER[NORM], UP: OLD[UP]})
    assert drain(engine)[0].weight_versions[-1].version == 3


def test_a_refusal_between_two_updates_in_flight_leaves_both(build: Build) -> None:
    engine = build(lookahead=1)
    engine.add_request(PROMPT, greedy())
    engine.step()
    first = engine.update_weights({UP: NEW[UP]})
    with pytest.raises(WeightUpdateError):
        engine.update_weights({UP: NEW[NORM]})
    second = engine.update_weights({NORM: NEW[NORM]})
    drain(engine)
    assert (first.result(0), second.result(0)) == (1, 2)
    assert_holds(engine, OLD | {UP: NEW[UP], NORM: NEW[NORM]})


def test_a_tied_head_is_compared_with_the_embedding_it_will_meet(build: Build, tied: Path) -> None:
    """An update in flight changes the embedding; a head that equals the new one belongs to it."""
    engine = build(model_path=str(tied), lookahead=1)
    engine.add_request(PROMPT, greedy())
    engine.step()
    engine.update_weights({EMBEDDING: NEW[EMBEDDING]})
    with pytest.raises(WeightUpdateError, match=HEAD):
        engine.update_weights({HEAD: OLD[EMBEDDING]})
    engine.update_weights({HEAD: NEW[EMBEDDING], NORM: NEW[NORM]})
    drain(engine)
    assert engine.get_weight_version() == 2
    assert torch.equal(current(engine)[EMBEDDING], NEW[EMBEDDING])


def test_a_sample_that_ends_while_weights_change_is_not_lost(build: Build) -> None:
    engine = build(lookahead=1)
    request = engine.add_request(PROMPT, greedy(2))
    engine.step()
    engine.step()
    engine.update_weights(NEW, blocking=True)
    (sample,) = drain(engine)
    assert sample.request_id == request
    assert len(sample.completion_tokens) == 2
    assert sample.weight_versions == (VersionSpan(0, 0, 2),)


# -- threads -----------------------------------------------------------------------------------------------------------


def while_stepping(engine: InferenceEngine, run: Callable[[], None]) -> None:
    """Call `run` while this thread is in the middle of `generate`, so that other threads' updates cannot be at once."""
    ran: list[int] = []

    def once(*_: int) -> None:
        if not ran:
            ran.append(1)
            run()

    engine.generate(PROMPT, greedy(3), progress=once)


def test_updates_from_two_threads_have_two_versions(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, updates = build(), list[WeightUpdate]()
    copy = engine.weight_sync._copy

    def slow_copy(*args: Any) -> Tensor:
        time.sleep(0.05)
        return copy(*args)

    monkeypatch.setattr(engine.weight_sync, "_copy", slow_copy)

    def both() -> None:
        threads = [
            threading.Thread(target=lambda name=name: updates.append(engine.update_weights({name: NEW[name]})))
            for name in (NORM, UP)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    while_stepping(engine, both)
    assert sorted(update.version for update in updates) == [1, 2]
    assert engine.get_weight_version() == 2
    assert_holds(engine, OLD | {NORM: NEW[NORM], UP: NEW[UP]})


def test_a_blocking_update_serves_when_it_returns_also_after_another_threads(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread stands between staging its update and announcing it."""
    engine, staged, go_on = build(), threading.Event(), threading.Event()
    main, stage = threading.current_thread(), engine.weight_sync.stage

    def stage_and_wait(*args: Any, **options: Any) -> WeightUpdate:
        update = stage(*args, **options)
        if threading.current_thread() is not main:
            staged.set()
            go_on.wait(0.3)
        return update

    monkeypatch.setattr(engine.weight_sync, "stage", stage_and_wait)
    other = threading.Thread(target=lambda: engine.update_weights({NORM: NEW[NORM]}))

    def begin() -> None:
        other.start()
        assert staged.wait(30)

    with pytest.raises(KeyError):  # leaves generate at once, while the other thread waits
        while_stepping(engine, lambda: (begin(), {}["leave"]))
    update = engine.update_weights({UP: NEW[UP]}, blocking=True)
    assert update.done()
    go_on.set()
    other.join(30)
    drain(engine)
    assert_holds(engine, OLD | {NORM: NEW[NORM], UP: NEW[UP]})


# -- the names of the first description --------------------------------------------------------------------------------


def test_the_manager_alone_stages_and_finishes(build: Build) -> None:
    engine = build()
    manager = WeightSyncManager(engine.model)
    assert not manager.maybe_finish_sync()
    manager.start_sync(NEW)
    assert manager.version == 0
    assert_holds(engine, OLD)
    assert manager.maybe_finish_sync()
    assert manager.version == 1
    assert_holds(engine, NEW)
    assert not manager.maybe_finish_sync()


def test_sync_blocking_comes_after_what_is_pending(build: Build) -> None:
    engine = build()
    manager = WeightSyncManager(engine.model)
    manager.start_sync(NEW)
    manager.sync_blocking({NORM: NEWER[NORM]})
    assert manager.version == 2
    assert_holds(engine, NEW | {NORM: NEWER[NORM]})
    with pytest.raises(WeightUpdateError):
        manager.start_sync({NORM: torch.ones(3)})
    assert not manager.maybe_finish_sync()


def test_start_sync_copies(build: Build) -> None:
    engine = build()
    given = {NORM: NEW[NORM].clone()}
    manager = WeightSyncManager(engine.model)
    manager.start_sync(given)
    given[NORM].zero_()
    manager.maybe_finish_sync()
    assert_holds(engine, OLD | {NORM: NEW[NORM]})
