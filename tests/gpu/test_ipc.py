"""Memory that another process lends on the same card, and NCCL through ctypes with one rank. They
need a card, and were not run yet.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nano_inference.errors import WeightTransferError
from nano_inference.parallel.card_memory import card_of
from nano_inference.parallel.deadline import Deadline
from nano_inference.parallel.nccl import Communicator, unique_id
from nano_inference.weights.transports.lent import borrowed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PATIENCE = 60.0  # seconds
SHAPES = {"a": (1000, 130), "b": (77,), "c": (64, 32)}
LENDER = """
import json, sys, torch
from nano_inference.weights.transports.lending import lend
torch.manual_seed(3)
weights = {name: torch.randn(shape, device="cuda") for name, shape in json.loads(sys.argv[1]).items()}
weights["c"] = weights["c"].T.contiguous().T
for _ in sys.stdin:
    torch.cuda.synchronize()
    print(json.dumps({"offers": lend(weights), "sums": {n: w.double().sum().item() for n, w in weights.items()}}), flush=True)
"""


@pytest.fixture
def lender() -> Iterator[Any]:
    command = [sys.executable, "-c", LENDER, json.dumps(SHAPES)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def offered(lender: Any) -> tuple[list[Any], dict[str, float]]:
    from nano_inference.server.trainers.handles import offers_of_json

    print(file=lender.stdin, flush=True)
    answer = json.loads(lender.stdout.readline())
    return offers_of_json(answer["offers"], "offers"), answer["sums"]


def test_lent_tensors_are_those_of_the_lender(lender: Any) -> None:
    """Each round lends the same memory again, after its handles were closed."""
    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(3):
        offers, sums = offered(lender)
        with borrowed(offers, card, SHAPES, set()) as tensors:
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
        assert {name: each.double().sum().item() for name, each in copies.items()} == sums


def test_dead_lender_is_reported_by_the_card(lender: Any) -> None:
    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    offers, _ = offered(lender)
    lender.kill()
    lender.wait()
    with pytest.raises(WeightTransferError), borrowed(offers, card, SHAPES, set()):
        pass


def test_communicator_of_one_rank_broadcasts() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    deadline = Deadline(PATIENCE)
    communicator = Communicator(unique_id(), 0, 1, device, deadline)
    communicator.warm_up(deadline)
    tensor = torch.randn(1 << 20, device=device)
    expected = tensor.clone()
    queued = communicator.broadcast(tensor, 0, deadline, "a tensor")
    communicator.wait(queued, deadline, "a tensor")
    assert torch.equal(tensor, expected)
    communicator.abort()
