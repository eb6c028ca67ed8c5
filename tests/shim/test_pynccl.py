"""Groups as vLLM's trainers make them: the id of NCCL in a store, then broadcasts of a real process,
over a compiled stand-in for NCCL.
"""

import ctypes
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nano_inference.errors import WeightTransferError, WeightUpdateError
from nano_inference.parallel.nccl import UNIQUE_ID_BYTES
from nano_inference.remote.engine_weights import EngineWeights
from nano_inference.weights.transports import Deadline, pynccl
from nano_inference.weights.transports.pynccl import KEY, id_in, join_pynccl, read_unique_id
from nano_inference.weights.transports.rendezvous import join_store, serve_store
from nano_inference.weights.transports.reuse import ReusedMemory
from nano_inference.weights.transports.trainer_broadcasts import TrainerBroadcasts, TrainerGroup
from nano_inference.weights.transports.wire import TensorInfo
from tests.parallel.stand_in import needs_compiler
from tests.parallel.stand_in import stand_in as stand_in
from tests.ports import free_port
from tests.shim.running import script
from tests.shim.tensors import sent

TRAINER = Path(__file__).with_name("pynccl_trainer.py")
CPU = torch.device("cpu")
PATIENCE = 20.0
SHAPES = {"a": (64, 8), "b": (64,)}
ID = bytes(range(UNIQUE_ID_BYTES))


def joined(port: int, seconds: float = PATIENCE) -> TrainerGroup:
    return join_pynccl(("127.0.0.1", port), 1, 2, Deadline(seconds), CPU)


def received(group: TrainerGroup) -> dict[str, torch.Tensor]:
    infos = [TensorInfo(name, "float32", shape) for name, shape in SHAPES.items()]
    transport = TrainerBroadcasts(group, infos, packed_bytes=None, memory=ReusedMemory())
    tensors: dict[str, Any] = {}
    for bucket in transport.receive(SHAPES, Deadline(PATIENCE)).buckets:
        tensors |= dict(bucket)  # pyright: ignore
    return tensors


@needs_compiler
@pytest.mark.thorough
@pytest.mark.usefixtures("stand_in")
def test_tensors_of_a_pynccl_trainer_arrive() -> None:
    port = free_port()
    with script(TRAINER, port, 2):
        group = joined(port)
        tensors = received(group)
        assert all(
            torch.equal(tensors[name], each) for name, each in zip(SHAPES, sent(), strict=True)
        )
        assert group.trainer_lives()
        group.close()


@needs_compiler
@pytest.mark.thorough
@pytest.mark.usefixtures("stand_in")
def test_killed_pynccl_trainer_is_reported() -> None:
    port = free_port()
    with script(TRAINER, port, 2, 1):
        group = joined(port)
        with pytest.raises(WeightTransferError, match="store has closed the connection"):
            received(group)
        assert not group.trainer_lives()
        group.close()


@needs_compiler
@pytest.mark.thorough
@pytest.mark.usefixtures("stand_in")
def test_pynccl_group_of_another_size_is_reported() -> None:
    port = free_port()
    with script(TRAINER, port, 3), pytest.raises(WeightTransferError):
        joined(port, 3.0)


# -- the id ----------------------------------------------------------------------------------------


class ncclUniqueId(ctypes.Structure):  # noqa: N801 (vLLM's name)
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class Short(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 16)]


class Runs:
    """Object whose pickle makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def as_vllm(made: Any, name: bytes = b"ncclUniqueId") -> bytes:
    """Return the pickle of a structure of this module as one of vLLM's."""
    module, class_name = type(made).__module__.encode(), type(made).__qualname__.encode()
    theirs = b"vllm.distributed.device_communicators.pynccl_wrapper"
    content = pickle.dumps(made)
    for old, new in ((module, theirs), (class_name, name)):
        content = content.replace(bytes([len(old)]) + old, bytes([len(new)]) + new)
    start = content.index(b"\x95")  # a frame, whose length has changed
    return content[:start] + content[start + 9 :]


def test_id_is_read_from_each_form() -> None:
    assert id_in(as_vllm(ncclUniqueId.from_buffer_copy(ID))) == ID
    assert id_in(pickle.dumps(ID)) == ID


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (as_vllm(Short()), "must be 128 bytes"),
        (as_vllm(Short(), b"Short"), "pynccl_wrapper.Short', which is not allowed"),
        (pickle.dumps(ID[:-1]), "must be 128 bytes"),
        (pickle.dumps(ID + b"a"), "must be 128 bytes"),
        (pickle.dumps("text"), "must be 128 bytes"),
        (pickle.dumps(None), "must be 128 bytes"),
        (pickle.dumps(ID)[:-1], "not a whole pickle"),
        (b"", "not a whole pickle"),
        (bytes(5000), "has 5000 bytes"),
    ],
)
def test_false_id_is_rejected(content: bytes, message: str) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        id_in(content)


def test_executing_id_is_rejected_by_name(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    address = ("127.0.0.1", free_port())
    store = serve_store(address, PATIENCE)
    store.set(KEY, pickle.dumps(Runs(mark)))
    client = join_store(address, 2, Deadline(PATIENCE))
    with pytest.raises(WeightUpdateError, match=r"names 'posix\.mkdir', which is not allowed"):
        read_unique_id(client, Deadline(PATIENCE))
    assert not mark.exists()


def test_store_without_an_id_is_reported() -> None:
    address = ("127.0.0.1", free_port())
    store = serve_store(address, PATIENCE)
    client = join_store(address, 2, Deadline(PATIENCE))
    with pytest.raises(WeightTransferError, match="got no id of NCCL at 'broadcast_from/0/0'"):
        read_unique_id(client, Deadline(0.1))
    del store


# -- the engine's choice ---------------------------------------------------------------------------


def weights_on(device: str) -> EngineWeights:
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(device=torch.device(device)), weight_sync=None
    )
    return EngineWeights(engine)


def test_card_joins_pynccl(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def join(address: Any, rank: int, size: int, *_: Any, unique_id: bytes | None) -> Any:
        seen.append((address, rank, size, unique_id))
        return SimpleNamespace(close=lambda: None, trainer_lives=lambda: True)

    monkeypatch.setattr(pynccl, "join_pynccl", join)
    weights = weights_on("cuda:0")
    weights.join_group("a", False, "127.0.0.1", 7, 1, 2, 1.0, pynccl=True)
    weights.join_group("b", False, "", 0, 1, 2, 1.0, pynccl=True, unique_id=ID)
    assert seen == [(("127.0.0.1", 7), 1, 2, None), (None, 1, 2, ID)]
    assert weights.has_group("b")


def test_cpu_joins_no_id_of_nccl() -> None:
    weights = weights_on("cpu")
    with pytest.raises(WeightUpdateError, match="an id of NCCL is for cards"):
        weights.join_group("a", False, "", 0, 1, 2, 1.0, pynccl=True, unique_id=ID)
    assert not weights.has_group("a")
