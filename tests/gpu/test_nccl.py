"""Weight updates by NCCL, as far as one card can test them: NCCL rejects two ranks on the same
card.

These cases need two cards: a broadcast to another process, a trainer that dies midway, a late
trainer (each of these two must fail one update, not the engine's process), steps that continue
during an update, and buffers that stay reserved until NCCL's group has ended.
"""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from nano_inference.errors import WeightTransferError
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.weights.transports.interface import Deadline
from nano_inference.weights.transports.rendezvous import device_for, join_group, serve_store

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not distributed.is_nccl_available(), reason="this torch has no NCCL"),
]
PATIENCE = 60.0  # seconds; the first collective creates a communicator


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    device = device_for("nccl", None)
    store = serve_store(("127.0.0.1", 0), PATIENCE)
    group = join_group(store, "room/", 0, 1, "nccl", device, "127.0.0.1", Deadline(PATIENCE))
    yield group
    group.close()


def test_received_tensor_is_complete_after_the_wait(group: ProcessGroup) -> None:
    """The host has waited for completion, so the tensor can be read on any stream."""
    sent = torch.randn(1 << 22, device=group.device)
    expected = sent.clone()
    group.broadcast(sent, Deadline(PATIENCE), "a tensor")
    with torch.cuda.stream(torch.cuda.Stream(group.device)):
        assert torch.equal(sent, expected)
    assert group.agree(True, Deadline(PATIENCE), "the answer")
    assert not group.agree(False, Deadline(PATIENCE), "the answer")
    assert not group._travelling


def test_another_thread_may_wait_and_close(group: ProcessGroup) -> None:
    done: list[bool] = []

    def run() -> None:
        group.broadcast(torch.ones(1000, device=group.device), Deadline(PATIENCE), "a tensor")
        done.append(True)

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(PATIENCE)
    assert done == [True, True]
    group.close()
    with pytest.raises(WeightTransferError, match="was closed"):
        group.agree(True, Deadline(PATIENCE), "the answer")


def test_missing_rank_raises_at_the_deadline() -> None:
    """The process survives, although torch's watchdog would end it."""
    device = device_for("nccl", None)
    store = serve_store(("127.0.0.1", 0), PATIENCE)
    began = time.monotonic()
    lonely = join_group(store, "room/", 0, 2, "nccl", device, "127.0.0.1", Deadline(3.0))
    with pytest.raises(WeightTransferError):
        lonely.agree(True, Deadline(3.0), "the answer")
    lonely.close()
    assert time.monotonic() - began < PATIENCE
    time.sleep(2.0)  # longer than the watchdog waits after the deadline
    assert torch.ones(2, device=device).sum().item() == 2.0
