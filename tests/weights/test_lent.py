"""Borrowed memory: handles close after the block, also if an error holds views of it."""

from pathlib import Path

import pytest
import torch

from nano_inference.errors import WeightUpdateError
from nano_inference.parallel.shared_tensors import Offer, SharedTensor
from nano_inference.weights.transports.lent import borrowed
from tests.server.trainers.handles_of import storage_of
from tests.server.trainers.host_card import HostCard
from tests.server.trainers.lender import Memory

SHAPES = {"a": (3, 4), "b": (5,)}
pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")


def refuse(tensor: torch.Tensor) -> None:
    half = tensor[1:]
    raise WeightUpdateError(f"{half.sum()} is too much.")


def test_handles_close_while_an_error_is_handled() -> None:
    memory, card = Memory(), HostCard()
    try:
        storages = tuple(storage_of(memory, torch.ones(SHAPES[name])) for name in SHAPES)
        offer = Offer(
            storages,
            tuple(
                SharedTensor(name, "float32", shape, 0, index)
                for index, (name, shape) in enumerate(SHAPES.items())
            ),
        )
        with (
            pytest.raises(WeightUpdateError) as caught,
            borrowed([offer], card, SHAPES, set()) as tensors,
        ):
            refuse(tensors["a"])
        assert "too much" in str(caught.value)
        assert card.close_all() == 2
    finally:
        memory.clear()
