"""Descriptions of the stand-in's memory."""

from torch import Tensor

from nano_inference.parallel.shared_tensors import SharedStorage
from tests.server.trainers.lender import CARD, Memory


def storage_of(memory: Memory, tensor: Tensor) -> SharedStorage:
    """Return the description of a storage that holds a copy of a tensor."""
    handle, size, offset, counter, index, event, waits = memory.share(tensor)
    return SharedStorage(CARD, handle, size, offset, counter.decode(), index, event, waits)
