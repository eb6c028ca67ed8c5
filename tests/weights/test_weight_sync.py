"""Weight updates of a live engine: in place, versioned, atomic and ordered."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import (
    InferenceEngine,
    VersionSpan,
    WeightSyncManager,
    WeightUpdate,
    WeightUpdateError,
)
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from tests.models.tiny import Weights, WithoutNumbers
from tests.weights.weight_cases import (
    EMBEDDING,
    HEAD,
    NEW,
    NEWER,
    NORM,
    OLD,
    PROMPT,
    UP,
    Build,
    assert_holds,
    bits,
    current,
    drain,
    drawn,
    greedy,
)

# -- written tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [False, True])
def test_update_changes_weights_in_place_and_bumps_the_version(
    build: Build, blocking: bool
) -> None:
    engine = build()
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in engine.model.params.items()}
    for version, weights in enumerate([NEW, NEWER, OLD], start=1):
        update = engine.update_weights(weights, blocking=blocking)
        assert update.done()
        assert update.result(0) == update.version == engine.get_weight_version() == version
        assert_holds(engine, weights)
    assert {name: (id(t), t.data_ptr()) for name, t in engine.model.params.items()} == before


@pytest.mark.parametrize(
    "names", [[NORM], [UP], [HEAD, EMBEDDING], ["model.layers.0.self_attn.k_proj.weight"]]
)
def test_partial_state_dict_changes_only_named_tensors(build: Build, names: list[str]) -> None:
    engine = build()
    engine.update_weights({name: NEW[name] for name in names})
    assert_holds(engine, OLD | {name: NEW[name] for name in names})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floating_dtypes_are_cast(build: Build, dtype: torch.dtype) -> None:
    engine = build()
    tensors = {name: tensor.to(dtype) for name, tensor in NEW.items()}
    engine.update_weights(tensors)
    assert_holds(engine, tensors)


def test_update_accepts_parameters_and_strided_tensors(build: Build) -> None:
    engine = build()
    tensors = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in NEW.items()}
    engine.update_weights({**tensors, UP: NEW[UP].T.contiguous().T})
    assert_holds(engine, NEW)
    assert not any(
        read(engine.model.params, slot).requires_grad
        for slot in slots(param_table(engine.spec)).values()
    )


@pytest.mark.parametrize("blocking", [False, True])
def test_served_tensors_may_be_swapped(build: Build, blocking: bool) -> None:
    """`state_dict` returns views: the first tensor is written before the second is read."""
    engine, other = build(backend="reference"), UP.replace("layers.1", "layers.0")
    served = engine.weight_sync.state_dict()
    engine.update_weights({UP: served[other], other: served[UP]}, blocking=blocking)
    assert_holds(engine, OLD | {UP: OLD[other], other: OLD[UP]})


def test_tensors_of_the_caller_are_not_retained(build: Build) -> None:
    engine = build()
    tensors = {name: tensor.clone() for name, tensor in NEW.items()}
    engine.update_weights(tensors, blocking=True)
    for tensor in tensors.values():
        tensor.zero_()
    assert_holds(engine, NEW)


# -- rejected updates ------------------------------------------------------------------------------

REFUSED: list[tuple[Any, str]] = [
    ({}, "non-empty state dict"),
    (None, "non-empty state dict"),
    ([(NORM, torch.ones(64))], "a patch must be"),
    ([], "non-empty state dict"),
    (torch.ones(3), "non-empty state dict"),
    ({"norm": torch.ones(64)}, "'norm' is not a tensor of this model"),
    ({"layers.0.qkv": torch.ones(128, 64)}, "use the names of its checkpoint"),
    ({NORM: torch.ones(64), "model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}, "layers.2"),
    ({NORM: torch.ones(65)}, r"'model.norm.weight' has shape \(65,\), expected \(64,\)"),
    ({NORM: torch.ones(1)}, r"shape \(1,\)"),
    ({UP: torch.ones(64, 96)}, r"shape \(64, 96\), expected \(96, 64\)"),
    ({EMBEDDING: torch.ones(301, 64)}, "shape"),
    ({NORM: torch.ones(64, dtype=torch.int64)}, "must be a floating point tensor, not int64"),
    ({NORM: torch.ones(64, dtype=torch.bool)}, "not bool"),
    ({NORM: torch.ones(64, dtype=torch.complex64)}, "not complex64"),
    ({NORM: torch.ones(64).to(torch.float8_e4m3fn)}, "not float8_e4m3fn"),
    ({NORM: WithoutNumbers(64)}, "must be a dense tensor with data"),
    (
        {UP: torch.ones(96, 64, dtype=torch.complex64).conj().imag},
        "must be a dense tensor with data",
    ),
    ({NORM: [1.0] * 64}, "not list"),
    ({NORM: None}, "not NoneType"),
    ({**NEW, NORM: torch.ones(3)}, "shape"),
]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(("weights", "message"), REFUSED)
def test_rejected_update_keeps_the_old_version(
    build: Build, weights: Any, message: str, blocking: bool, running: bool
) -> None:
    expected = build().generate(PROMPT, drawn())[0]
    engine = build(lookahead=1)
    if running:
        engine.add_request(PROMPT, drawn())
        for _ in range(3):
            engine.step()
    with pytest.raises(WeightUpdateError, match=message):
        engine.update_weights(weights, blocking=blocking)
    assert engine.get_weight_version() == 0
    assert_holds(engine, OLD)
    sample = drain(engine)[0] if running else engine.generate(PROMPT, drawn())[0]
    assert sample.completion_tokens == expected.completion_tokens
    assert sample.logprobs == expected.logprobs
    assert sample.weight_versions == (VersionSpan(0, 0, 8),)
    assert engine.update_weights(NEW, blocking=True).version == 1


@pytest.mark.parametrize("version", [0, -1, 4, 5])
def test_explicit_version_must_grow(build: Build, version: int) -> None:
    engine = build()
    assert engine.update_weights(NEW, version=5).version == 5
    with pytest.raises(
        WeightUpdateError,
        match=f"version={version} (must be higher than 5|must be an integer from 0)",
    ):
        engine.update_weights(NEWER, version=version)
    assert_holds(engine, NEW)
    assert engine.update_weights(NEWER).version == 6
    assert engine.get_weight_version() == 6


@pytest.mark.parametrize("version", ["7", 1.5, True, [3]])
def test_version_is_an_integer(build: Build, version: Any) -> None:
    engine = build()
    with pytest.raises(WeightUpdateError, match="version"):
        engine.update_weights(NEW, version=version)
    assert_holds(engine, OLD)


def test_tied_head_is_accepted_if_it_equals_the_embedding(build: Build, tied: Path) -> None:
    engine = build(model_path=str(tied))
    engine.update_weights({EMBEDDING: NEW[EMBEDDING], HEAD: NEW[EMBEDDING].clone()})
    assert torch.equal(current(engine)[EMBEDDING], NEW[EMBEDDING])
    engine.update_weights({HEAD: NEW[EMBEDDING]})  # equal to the live tensor
    assert engine.get_weight_version() == 2


@pytest.mark.parametrize(
    "weights",
    [
        {EMBEDDING: NEW[EMBEDDING], HEAD: NEWER[EMBEDDING]},
        {HEAD: NEWER[EMBEDDING]},
        {HEAD: NEW[EMBEDDING][:-1]},
    ],
)
def test_tied_head_that_differs_is_rejected(build: Build, tied: Path, weights: Weights) -> None:
    engine = build(model_path=str(tied))
    before = engine.generate(PROMPT, drawn())[0]
    with pytest.raises(WeightUpdateError, match=HEAD):
        engine.update_weights(weights)
    assert engine.get_weight_version() == 0
    engine.flush_cache()
    assert bits(engine.generate(PROMPT, drawn())[0]) == bits(before)


# -- order and ownership ---------------------------------------------------------------------------


def test_update_staged_in_flight_is_a_copy(build: Build) -> None:
    engine = build(lookahead=1)
    engine.add_request(PROMPT, greedy())
    engine.step()
    tensors = {name: tensor.clone() for name, tensor in NEW.items()}
    update = engine.update_weights(tensors)
    for tensor in tensors.values():
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


def test_rejected_update_leaves_its_neighbors_in_flight(build: Build) -> None:
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


def test_tied_head_is_compared_with_the_pending_embedding(build: Build, tied: Path) -> None:
    """An update in flight changes the embedding. A head that equals the new embedding is accepted."""
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


def test_sample_that_ends_during_an_update_is_not_lost(build: Build) -> None:
    engine = build(lookahead=1)
    request = engine.add_request(PROMPT, greedy(2))
    engine.step()
    engine.step()
    engine.update_weights(NEW, blocking=True)
    (sample,) = drain(engine)
    assert sample.request_id == request
    assert len(sample.completion_tokens) == 2
    assert sample.weight_versions == (VersionSpan(0, 0, 2),)


# -- threads ---------------------------------------------------------------------------------------


def while_stepping(engine: InferenceEngine, run: Callable[[], None]) -> None:
    """Call `run` while this thread is inside `generate`, so that updates of other threads must
    queue.
    """
    ran: list[int] = []

    def once(*_: int) -> None:
        if not ran:
            ran.append(1)
            run()

    engine.generate(PROMPT, greedy(3), progress=once)


def test_updates_from_two_threads_have_two_versions(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, updates = build(), list[WeightUpdate]()
    stage = engine.weight_sync.stage

    def slow_stage(*args: Any, **options: Any) -> WeightUpdate:
        time.sleep(0.05)
        return stage(*args, **options)

    monkeypatch.setattr(engine.weight_sync, "stage", slow_stage)

    def both() -> None:
        threads = [
            threading.Thread(
                target=lambda name=name: updates.append(engine.update_weights({name: NEW[name]}))
            )
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


def test_blocking_update_is_live_after_one_of_another_thread(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread is between staging its update and announcing it."""
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

    with pytest.raises(KeyError):  # leaves generate immediately, while the other thread waits
        while_stepping(engine, lambda: (begin(), {}["leave"]))
    update = engine.update_weights({UP: NEW[UP]}, blocking=True)
    assert update.done()
    go_on.set()
    other.join(30)
    drain(engine)
    assert_holds(engine, OLD | {NORM: NEW[NORM], UP: NEW[UP]})


def test_withdrawn_update_leaves_the_queue_and_releases_requests(build: Build) -> None:
    engine = build()
    manager = engine.weight_sync
    engine.add_request(PROMPT, drawn())
    engine.step()
    update = engine.update_weights(NEW, kv_policy="wait")
    builds_on_it = engine.update_weights({NORM: NEWER[NORM]})
    held = engine.add_request(PROMPT, drawn())
    engine.step()
    assert engine.stats().num_held == 1
    assert manager.pending.all() == [update, builds_on_it]
    assert manager.withdraw(update, WeightUpdateError("it takes too long."))
    assert (len(manager.pending), manager.newest) == (0, 0)
    engine.step()
    assert engine.stats().num_held == 0
    assert held in {sample.request_id for sample in drain(engine)}
    with pytest.raises(WeightUpdateError, match="builds on it"):
        builds_on_it.result(0)
    assert_holds(engine, OLD)


def test_withdrawn_update_is_not_applied(build: Build) -> None:
    engine = build()
    manager = WeightSyncManager(engine.model)
    update, later = manager.stage(NEW), manager.stage(NEWER)
    assert manager.withdraw(update, WeightUpdateError("it takes too long."))
    assert manager.apply(update) is None
    assert manager.pending.all() == [later]
    assert manager.apply(later) == manager.version == 2
    assert_holds(engine, NEWER)


# -- names of the original specification -----------------------------------------------------------


def test_manager_stages_and_finishes_without_an_engine(build: Build) -> None:
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


def test_blocking_sync_follows_pending_updates(build: Build) -> None:
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
    tensors = {NORM: NEW[NORM].clone()}
    manager = WeightSyncManager(engine.model)
    manager.start_sync(tensors)
    tensors[NORM].zero_()
    manager.maybe_finish_sync()
    assert_holds(engine, OLD | {NORM: NEW[NORM]})
