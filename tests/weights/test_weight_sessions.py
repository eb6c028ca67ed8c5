"""Updates in buckets: any partition gives the same weights, and any error applies none of them."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from nano_inference import WeightSyncManager, WeightUpdate, WeightUpdateError
from nano_inference.weights.sources import cut_into_buckets
from nano_inference.weights.staging import WeightPatch
from tests.depth import at_depth
from tests.models.tiny import Weights, llama_config, llama_weights
from tests.weights.weight_cases import EMBEDDING, HEAD, NEW, NEWER, NORM, OLD, UP, decoder, synced

SMALL = {
    "vocab_size": 21,
    "hidden": 48,
    "inner": 37,
    "layers": 1,
    "num_heads": 3,
    "num_kv_heads": 1,
}
SMALL_WEIGHTS = llama_weights(llama_config(**SMALL), seed=4)
GATE = "model.layers.0.mlp.gate_proj.weight"
TIED_WEIGHTS = {name: tensor for name, tensor in NEW.items() if name != HEAD}


@pytest.fixture
def manager() -> WeightSyncManager:
    manager = WeightSyncManager(decoder())
    synced(manager, OLD)
    return manager


@pytest.fixture
def tied_manager() -> WeightSyncManager:
    manager = WeightSyncManager(decoder(tie=True))
    synced(manager, {name: tensor for name, tensor in OLD.items() if name != HEAD})
    return manager


def as_patches(data: st.DataObject, name: str, tensor: Tensor) -> list[list[WeightPatch]]:
    """Split a tensor into one to three patches at shuffled indices."""
    order = (
        data.draw(st.permutations(range(tensor.numel())))
        if tensor.numel() < 40
        else range(tensor.numel())[::-1]
    )
    parts = torch.tensor(list(order)).chunk(data.draw(st.integers(1, 3)))
    return [[WeightPatch(name, part, tensor.reshape(-1)[part])] for part in parts]


def partition(data: st.DataObject, weights: Weights) -> list[Any]:
    """Split the weights into random buckets in a random order, some as patches."""
    buckets: list[Any] = []
    names = data.draw(st.permutations(sorted(weights)))
    for name in names:
        if data.draw(st.integers(0, 2)) == 0:
            buckets += as_patches(data, name, weights[name])
        elif buckets and isinstance(buckets[-1], dict) and data.draw(st.booleans()):
            buckets[-1][name] = weights[name]
        else:
            buckets.append({name: weights[name]})
    return buckets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@settings(max_examples=at_depth(12), deadline=None)
@given(st.data())
def test_bucket_partition_does_not_change_the_checksum(
    backend: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    source = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    tie = data.draw(st.booleans())
    weights = {
        name: tensor.to(source)
        for name, tensor in SMALL_WEIGHTS.items()
        if not (tie and name == HEAD)
    }
    weights[GATE] = (weights[GATE] * 1e-39).to(source)  # denormals
    given_weights = weights | (
        {HEAD: weights[EMBEDDING]} if tie and data.draw(st.booleans()) else {}
    )
    expected = synced(
        WeightSyncManager(decoder(backend, dtype, tie=tie, **SMALL)), given_weights, copy=False
    )
    manager = WeightSyncManager(decoder(backend, dtype, tie=tie, **SMALL))
    pointers = {name: param.data_ptr() for name, param in manager.model.params.items()}
    buckets = partition(data, given_weights)
    if data.draw(st.booleans()):
        manager.begin(complete=True, check_finite=True)
        for bucket in buckets:
            manager.receive(bucket)
        update = manager.end()
    else:
        update = manager.stage(iter(buckets), complete=True, check_finite=True)
    assert update.params == set(manager.model.params)
    assert set(manager.checksum().values()) != set(expected.values()), "written too early"
    assert manager.finish() == 1
    assert manager.checksum() == expected
    assert {name: param.data_ptr() for name, param in manager.model.params.items()} == pointers


@pytest.mark.parametrize("max_bytes", [1, 1000, 20_000, 10**9])
def test_state_dict_is_cut_into_buckets(max_bytes: int) -> None:
    buckets = list(cut_into_buckets(NEW, max_bytes))
    assert [name for bucket in buckets for name in bucket] == list(NEW)
    assert all(
        len(bucket) == 1 or sum(t.nbytes for t in bucket.values()) <= max_bytes
        for bucket in buckets
    )
    for one, after in itertools.pairwise(buckets):
        together = sum(tensor.nbytes for tensor in one.values()) + next(iter(after.values())).nbytes
        assert together > max_bytes, "a bucket is smaller than necessary"
    with pytest.raises(ValueError, match="max_bytes=0"):
        list(cut_into_buckets(NEW, 0))


def test_files_are_read_in_place(manager: WeightSyncManager, tmp_path: Path) -> None:
    save_file(NEW, tmp_path / "all.safetensors")
    expected = synced(manager, NEW)
    assert synced(manager, OLD) != expected
    assert synced(manager, tmp_path, complete=True) == expected
    synced(manager, OLD)
    assert synced(manager, str(tmp_path / "all.safetensors"), copy=False) == expected


# -- rejected updates ------------------------------------------------------------------------------

NAN, INFINITE = NEW[NORM].clone(), NEW[UP].clone()
NAN[3], INFINITE[5, 7] = torch.nan, -torch.inf

FAULTS: list[tuple[list[Any], dict[str, Any], str]] = [
    ([{"norm": torch.ones(64)}], {}, "'norm' is not a tensor of this model"),
    ([{3: torch.ones(64)}], {}, "3 is not a tensor"),
    ([{UP: NEW[UP]}, {NORM: torch.ones(65)}], {}, r"'model.norm.weight' has shape \(65,\)"),
    ([{NORM: torch.ones(64, dtype=torch.int64)}], {}, "'model.norm.weight' must be a floating"),
    ([{NORM: torch.ones(64, device="meta")}], {}, "'model.norm.weight' must be a dense"),
    ([{UP: NEW[UP].to_sparse()}], {}, "up_proj.weight' must be a dense"),
    ([{NORM: NEW[NORM]}, {NORM: NEW[NORM]}], {}, "'model.norm.weight' occurs twice"),
    (
        [{NORM: NEW[NORM]}, [(NORM, torch.tensor([1]), torch.ones(1))]],
        {},
        "occurs twice .* as a patch",
    ),
    ([[(NORM, torch.tensor([1]), torch.ones(1))], {NORM: NEW[NORM]}], {}, "occurs twice"),
    ([{UP: NEW[UP]}, {NORM: NAN}], {"check_finite": True}, "'model.norm.weight' holds NaN"),
    ([{UP: INFINITE}], {"check_finite": True}, "up_proj.weight' holds NaN or infinite"),
    (
        [[(NORM, torch.tensor([1]), torch.tensor([torch.nan]))]],
        {"check_finite": True},
        "'model.norm.weight' holds NaN",
    ),
    (
        [{NORM: torch.full((64,), 1e300, dtype=torch.float64)}],
        {"check_finite": True},
        "infinite values in float32",
    ),
    (
        [{name: t for name, t in NEW.items() if name != UP}],
        {"complete": True},
        "up_proj.weight' is missing .1 of 21",
    ),
    ([{UP: NEW[UP]}, 7], {}, "not int"),
    ([{UP: NEW[UP]}, [(UP, torch.tensor([1]))]], {}, "a patch must be"),
    ([], {}, "non-empty state dict"),
    ([{}], {}, "non-empty state dict"),
]


@pytest.mark.parametrize("way", ["session", "buckets"])
@pytest.mark.parametrize(("buckets", "options", "message"), FAULTS)
def test_fault_keeps_the_old_weights_and_allows_a_new_update(
    manager: WeightSyncManager, way: str, buckets: list[Any], options: dict[str, Any], message: str
) -> None:
    before, updates = manager.checksum(), list[WeightUpdate]()

    def run() -> None:
        if way == "buckets":
            manager.stage(iter(buckets), **options)
            return
        updates.append(manager.begin(**options))
        for bucket in buckets:
            manager.receive(bucket)
        manager.end()

    with pytest.raises(WeightUpdateError, match=message):
        run()
    assert not manager.pending
    assert (manager.version, manager.checksum()) == (1, before)
    for update in updates:
        assert update.done()
        with pytest.raises(WeightUpdateError, match=message):
            update.result(0)
    with pytest.raises(WeightUpdateError, match="no weight session is open"):
        manager.receive({NORM: NEW[NORM]})
    manager.begin(**options)
    manager.receive(NEWER)
    assert manager.end().version == 2
    manager.finish()
    assert manager.checksum() == synced(WeightSyncManager(decoder()), NEWER)


def test_non_finite_values_pass_without_check_finite(manager: WeightSyncManager) -> None:
    manager.stage({NORM: NAN})
    manager.finish()
    assert manager.version == 2


def test_second_session_is_rejected_and_the_first_continues(manager: WeightSyncManager) -> None:
    first = manager.begin(version=9)
    manager.receive({NORM: NEW[NORM]})
    with pytest.raises(WeightUpdateError, match="already open"):
        manager.begin()
    manager.receive({UP: NEW[UP]})
    assert manager.end() is first
    assert not first.done()
    manager.finish()
    assert first.result(0) == 9
    assert manager.checksum() == synced(
        WeightSyncManager(decoder()), OLD | {NORM: NEW[NORM], UP: NEW[UP]}
    )


def test_whole_update_may_precede_the_end_of_a_session(
    manager: WeightSyncManager,
) -> None:
    session = manager.begin()
    manager.receive({NORM: NEW[NORM]})
    assert manager.stage({NORM: NEWER[NORM]}).version == 2
    assert manager.end().version == 3
    manager.finish()
    manager.finish()
    assert session.result(0) == 3
    assert manager.checksum()[NORM] == synced(WeightSyncManager(decoder()), NEW)[NORM]


def test_cancelled_session_reports_its_cancellation(manager: WeightSyncManager) -> None:
    update = manager.begin()
    manager.receive({NORM: NEW[NORM]})
    with pytest.raises(WeightUpdateError, match="no version while it is being received"):
        _ = update.version
    with pytest.raises(WeightUpdateError, match="was not received within"):
        update.result(0.01)
    manager.cancel()
    with pytest.raises(WeightUpdateError, match="was cancelled"):
        update.result(0)
    for call in (manager.end, lambda: manager.receive({NORM: NEW[NORM]})):
        with pytest.raises(WeightUpdateError, match="no weight session"):
            call()
    manager.cancel()
    assert manager.begin() is not update


@pytest.mark.parametrize("version", [1, 0, "2", True])
def test_version_must_be_new(manager: WeightSyncManager, version: Any) -> None:
    with pytest.raises(WeightUpdateError, match="version"):
        manager.begin(version=version)
    manager.begin(version=3)
    manager.receive({NORM: NEW[NORM]})
    manager.stage({NORM: NEW[NORM]}, version=4)
    with pytest.raises(WeightUpdateError, match="version=3 must be higher than 4"):
        manager.end()


def test_failed_bucket_transfer_names_the_reason(manager: WeightSyncManager) -> None:
    def buckets() -> Iterator[Weights]:
        yield {NORM: NEW[NORM]}
        raise OSError("the disk is gone")

    with pytest.raises(WeightUpdateError, match=r"after 1 buckets: .*the disk is gone"):
        manager.stage(buckets())
    assert not manager.pending


def test_received_tensors_are_copied_unless_owned(manager: WeightSyncManager) -> None:
    manager.begin()
    mine, yours = NEW[NORM].clone(), NEW[UP].clone()
    manager.receive({NORM: mine})
    manager.receive({UP: yours}, copy=False)
    mine.zero_()
    update = manager.end()
    assert update.staged_bytes == mine.nbytes + yours.nbytes
    assert update.params == {"norm", "layers.1.gate_up"}
    manager.finish()
    assert manager.checksum() == synced(
        WeightSyncManager(decoder()), OLD | {NORM: NEW[NORM], UP: NEW[UP]}
    )
    assert manager.stage(NEWER, copy=False).staged_bytes == 0


def test_update_is_announced_once_it_is_queued() -> None:
    announced: list[tuple[int, int]] = []
    manager = WeightSyncManager(
        decoder(), lambda update: announced.append((update.version, len(manager.pending)))
    )
    manager.stage(OLD)
    manager.begin()
    manager.receive(NEW)
    manager.end()
    assert announced == [(1, 1), (2, 2)]


# -- tied heads ------------------------------------------------------------------------------------

ELSE = NEW[EMBEDDING].clone()
ELSE[5, 6] += 1
PLACE = torch.tensor([5 * 64 + 6])
ONE = [(EMBEDDING, PLACE, ELSE[5, 6].reshape(1))]
SAME = [(HEAD, PLACE, ELSE[5, 6].reshape(1))]


@pytest.mark.parametrize(
    ("buckets", "fits"),
    [
        ([{HEAD: NEW[EMBEDDING]}], True),
        ([{HEAD: ELSE}], False),
        ([{HEAD: ELSE}, {EMBEDDING: ELSE}], True),
        ([{HEAD: ELSE}, ONE], True),
        ([ONE], True),
        ([ONE, SAME], True),
        ([SAME], False),
        ([SAME, {EMBEDDING: ELSE}], True),
        ([SAME, {EMBEDDING: NEW[EMBEDDING]}], False),
        ([ONE, {HEAD: NEW[EMBEDDING]}], False),
    ],
)
def test_tied_head_follows_the_embedding(
    tied_manager: WeightSyncManager, buckets: list[Any], fits: bool
) -> None:
    tied_manager.stage(TIED_WEIGHTS)  # pending: the tied tensor follows this update
    if not fits:
        with pytest.raises(
            WeightUpdateError, match=r"'lm_head.weight' is tied to 'model.embed_tokens.weight'"
        ):
            tied_manager.stage(buckets)
        assert len(tied_manager.pending) == 1
        return
    tied_manager.stage(buckets)
    tied_manager.finish()
    tied_manager.finish()
    embedding = NEW[EMBEDDING] if buckets == [{HEAD: NEW[EMBEDDING]}] else ELSE
    expected = synced(WeightSyncManager(decoder(tie=True)), TIED_WEIGHTS | {EMBEDDING: embedding})
    assert tied_manager.checksum() == expected


# -- patches ---------------------------------------------------------------------------------------

WRONG: list[tuple[Callable[[], tuple[Any, Any]], str]] = [
    (lambda: (torch.tensor([3, 3]), torch.ones(2)), "index 3 more than once"),
    (lambda: (torch.tensor([9, 4, 9]), torch.ones(3)), "index 9 more than once"),
    (lambda: (torch.tensor([-1, 4]), torch.ones(2)), "index -1, which is outside its 64"),
    (lambda: (torch.tensor([3, 64]), torch.ones(2)), "index 64, which is outside its 64"),
    (lambda: (torch.tensor([3, 4]), torch.ones(3)), r"\(2,\) and values of shape \(3,\)"),
    (lambda: (torch.tensor([[3]]), torch.ones(1, 1)), "must be"),
    (lambda: (torch.tensor([3.0]), torch.ones(1)), "not float32"),
    (lambda: ([3], torch.ones(1)), "not list"),
    (lambda: (torch.tensor([3]), torch.ones(1, dtype=torch.int64)), "must be a floating"),
    (lambda: (torch.tensor([3]), [1.0]), "must be a floating"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_wrong_patch_is_rejected(
    manager: WeightSyncManager, make: Callable[[], Any], message: str
) -> None:
    before = manager.checksum()
    with pytest.raises(WeightUpdateError, match=f"'model.norm.weight'.*{message}"):
        manager.stage([{UP: NEW[UP]}, [WeightPatch(NORM, *make())]])
    assert manager.checksum() == before


def test_patches_of_a_tensor_must_not_overlap(manager: WeightSyncManager) -> None:
    manager.begin()
    manager.receive(WeightPatch(NORM, torch.tensor([5, 1]), torch.ones(2)))
    manager.receive((NORM, torch.tensor([0, 2], dtype=torch.int32), torch.ones(2)))
    with pytest.raises(WeightUpdateError, match="index 1 more than once"):
        manager.receive([(NORM, torch.tensor([1, 3]), torch.ones(2))])


def test_session_opens_for_only_one_of_two_threads(manager: WeightSyncManager) -> None:
    opened: list[bool] = []
    barrier = threading.Barrier(8)

    def run() -> None:
        barrier.wait()
        try:
            manager.begin()
            opened.append(True)
        except WeightUpdateError:
            opened.append(False)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(opened) == 1
