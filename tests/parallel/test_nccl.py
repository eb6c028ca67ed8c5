"""NCCL through ctypes, with a compiled stand-in of the same signatures, on threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.errors import WeightTransferError
from nano_inference.parallel import nccl
from nano_inference.parallel.deadline import Deadline
from nano_inference.parallel.nccl import UNIQUE_ID_BYTES, Communicator, unique_id
from tests.parallel.stand_in import needs_compiler
from tests.parallel.stand_in import stand_in as stand_in

CPU = torch.device("cpu")
PATIENCE = 20.0
pytestmark = [needs_compiler, pytest.mark.usefixtures("stand_in")]


def connected(content: bytes, rank: int, size: int = 2, seconds: float = PATIENCE) -> Communicator:
    return Communicator(content, rank, size, CPU, Deadline(seconds))


def on_both(act: Callable[[Communicator], Any]) -> list[Any]:
    """Return what a function returns on each of two connected ranks."""
    content = unique_id()

    def run(rank: int) -> Any:
        communicator = connected(content, rank)
        try:
            communicator.warm_up(Deadline(PATIENCE))
            both.wait(PATIENCE)
            return act(communicator)
        finally:
            both.wait(PATIENCE)
            communicator.abort()

    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def arrived(communicator: Communicator, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    deadline = Deadline(PATIENCE)
    communicator.wait(
        communicator.broadcast(tensor, root, deadline, "a tensor"), deadline, "a tensor"
    )
    return tensor


def test_unique_ids_have_nccls_length() -> None:
    assert len({unique_id(), unique_id()}) == 2
    assert len(unique_id()) == UNIQUE_ID_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_broadcast_copies_every_bit(dtype: torch.dtype) -> None:
    """NaN payloads and negative zeros arrive as they are."""
    sent = torch.randint(0, 256, (4096,), dtype=torch.uint8)

    def act(communicator: Communicator) -> list[torch.Tensor]:
        empty = torch.zeros_like(sent)
        tensors = [(sent.clone() if communicator.rank == 0 else empty).view(dtype), empty + 7]
        return [arrived(communicator, each).view(torch.uint8) for each in tensors]

    _, received = on_both(act)
    assert torch.equal(received[0], sent)


def test_missing_rank_is_reported_at_the_deadline() -> None:
    with pytest.raises(WeightTransferError, match=r"2 ranks .* within 0\.1 s"):
        connected(unique_id(), 1, seconds=0.1)


def test_group_of_another_size_is_reported() -> None:
    content = unique_id()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(connected, content, 0, 3, 2.0)
        with pytest.raises(WeightTransferError, match=r"'(invalid usage|remote process exited)'"):
            connected(content, 1)
        assert isinstance(other.exception(), WeightTransferError)


def test_unknown_id_is_reported() -> None:
    with pytest.raises(WeightTransferError, match="'invalid argument'"):
        connected(b"/nobody/made/this".ljust(UNIQUE_ID_BYTES, b"\0"), 1)


def test_broadcast_ends_with_the_other_rank() -> None:
    def act(communicator: Communicator) -> str:
        if communicator.rank == 0:
            communicator.abort()
            return ""
        with pytest.raises(WeightTransferError, match="remote process exited") as caught:
            arrived(communicator, torch.zeros(8))
        return str(caught.value)

    assert "failed" in on_both(act)[1]


def test_closed_group_is_reported() -> None:
    def act(communicator: Communicator) -> None:
        communicator.abort()
        communicator.abort()
        with pytest.raises(WeightTransferError, match="was closed"):
            communicator.broadcast(torch.zeros(1), 0, Deadline(1.0), "a tensor")

    on_both(act)


def test_missing_library_is_reported(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nccl.LIBRARY, str(stand_in.with_name("nobody.so")))
    nccl.library.cache_clear()
    with pytest.raises(WeightTransferError, match=nccl.LIBRARY):
        unique_id()
    nccl.library.cache_clear()
