"""Updates of an engine on a GPU, as far as a machine without one can test them: staging and memory
held by groups.
"""

import gc
import os
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.checkpoints.loading import load_spec
from nano_inference.engine.weight_updates import staging_room
from nano_inference.errors import WeightTransferError
from nano_inference.models.sharding.shard import shard_of
from nano_inference.parallel.process_group import ProcessGroup, dist
from nano_inference.weights.staging import Hold, WeightSession
from nano_inference.weights.transports import Deadline
from nano_inference.weights.transports.rendezvous import device_for, join_group
from nano_inference.weights.update import WeightSet
from tests.device.card import Card
from tests.models.tiny import tiny_llama

CARD = torch.device("cuda:0")
PATIENCE = 10.0


class Work:
    """A collective on a card that completes when the test says so."""

    def __init__(self) -> None:
        self.is_done = False

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> bool:
        return True


class Nccl:
    """A process group whose first collective may never complete."""

    def __init__(self, silent: bool = False) -> None:
        self.silent, self.works, self.aborted = silent, list[Work](), 0
        self.may_end, self.may_come = threading.Event(), threading.Event()

    def broadcast(self, tensors: list[Tensor], options: object) -> Work:
        if self.silent:
            assert self.may_come.wait(PATIENCE)
        self.works.append(Work())
        return self.works[-1]

    def abort(self) -> None:
        assert self.may_end.wait(PATIENCE)
        self.aborted += 1


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.thorough
def test_memory_is_held_until_nccl_finishes_writing() -> None:
    nccl = Nccl()
    group = ProcessGroup(nccl, CARD)
    tensor = torch.zeros(8)
    seen = weakref.ref(tensor)
    work = group.begin_broadcast(tensor, Deadline(PATIENCE), "a tensor")
    del tensor
    gc.collect()
    assert seen() is not None
    nccl.works[0].is_done = True
    group.wait([work], "a tensor", Deadline(PATIENCE))
    until(lambda: gc.collect() is not None and seen() is None)


@pytest.mark.thorough
def test_closed_group_holds_memory_until_its_collective_ends() -> None:
    nccl = Nccl()
    group = ProcessGroup(nccl, CARD)
    tensor = torch.zeros(8)
    seen = weakref.ref(tensor)
    group.begin_broadcast(tensor, Deadline(PATIENCE), "a tensor")
    del tensor
    group.close()
    gc.collect()
    assert seen() is not None
    assert not nccl.aborted
    nccl.may_end.set()
    until(lambda: nccl.aborted and gc.collect() is not None and seen() is None)


def test_hanging_first_collective_does_not_block_the_caller() -> None:
    nccl = Nccl(silent=True)
    nccl.may_end.set()
    group = ProcessGroup(nccl, CARD)
    with pytest.raises(WeightTransferError, match=r"within 0\.2 s"):
        group.begin_broadcast(torch.zeros(1), Deadline(0.2), "a tensor")
    assert not nccl.works
    nccl.may_come.set()
    group.close()


def test_torch_watchdog_is_configured_to_spare_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch reads the setting when a group is made. Other groups of the process keep the original
    setting.
    """
    seen: list[tuple[str | None, ...]] = []
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
    monkeypatch.setenv(names[0], "1")
    monkeypatch.delenv(names[1], raising=False)

    class Made:
        Options = type("Options", (), {})

        def __init__(self, *_: object) -> None:
            seen.append(tuple(map(os.environ.get, names)))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Made, raising=False)
    monkeypatch.setattr(dist, "PrefixStore", lambda *_: None)
    join_group(None, "room", 0, 1, "nccl", CARD, "127.0.0.1", Deadline(PATIENCE))
    assert seen == [("2", "0")]
    assert tuple(map(os.environ.get, names)) == ("1", None)


def test_card_has_its_number_on_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_for("nccl", None) == device_for("gloo", "cuda") == torch.device("cuda:3")
    assert device_for("nccl", "cuda:1") == torch.device("cuda:1")
    assert device_for("gloo", None) == torch.device("cpu")


def test_update_fits_the_free_memory_of_the_card(tmp_path: Path) -> None:
    """Tensors beyond the free memory wait on the CPU. The device "meta" plays the card."""
    spec = load_spec(tiny_llama(tmp_path))
    model: Any = SimpleNamespace(
        part=shard_of(spec), params={}, dtype=torch.bfloat16, device=torch.device("meta")
    )
    places = WeightSet(model)
    weights = {name: torch.zeros(shape) for name, shape in places.shapes.items()}
    sizes = [2 * tensor.numel() for tensor in weights.values()]
    room = sum(sizes) // 2
    session = WeightSession(places, complete=True, check_finite=False, room=room)
    session.add(weights, Hold.COPY)
    placed = {"meta": 0, "cpu": 0}
    for change in session.staged.changes:
        placed[change.values.device.type] += change.values.nbytes
        assert change.values.dtype is torch.bfloat16
    assert room - max(sizes) < placed["meta"] <= room
    assert sum(placed.values()) == sum(sizes)


def test_update_room_excludes_the_workspace_of_a_step() -> None:
    card = Card(total=100, others=30, weights=20, cached=10)  # 50 are free, 10 of them torch's
    assert staging_room(CARD, 10, card) == 20
    assert staging_room(CARD, 60, card) == 0
    assert staging_room(torch.device("cpu"), 10**12) == float("inf")
