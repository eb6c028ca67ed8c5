"""Memory of another process on the same card, opened by CUDA IPC."""

from typing import Any, Protocol

import torch
from torch import Tensor

from nano_inference.errors import WeightTransferError, WeightUpdateError
from nano_inference.parallel.process_group import first_line
from nano_inference.parallel.shared_tensors import SharedStorage


class Card(Protocol):
    """Card that can open memory of other processes.

    Attributes:
        uuid: UUID of the card.
    """

    uuid: str

    def open(self, storage: SharedStorage) -> Tensor:
        """Return a storage's bytes, uint8 [size]. The handle closes when the last view of the
        tensor is freed.

        Raises `WeightTransferError` if the driver rejects the handle.
        """
        ...

    def settle(self) -> None:
        """Wait until all copies that this thread has queued are complete."""
        ...


class CudaCard:
    """NVIDIA card of this process.

    Args:
        device: CUDA device with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.uuid = str(torch.cuda.get_device_properties(device).uuid)

    def open(self, storage: SharedStorage) -> Tensor:
        """Open a storage, as `Card.open`."""
        shared: Any = torch.UntypedStorage
        try:
            opened = shared._new_shared_cuda(
                self.device.index,
                storage.handle,
                storage.size,
                storage.offset,
                storage.counter.encode(),
                storage.counter_index,
                storage.event,
                storage.waits,
            )
        except RuntimeError as problem:
            raise WeightTransferError(
                f"the memory of process {storage.pid} cannot be opened: {first_line(problem)}"
            ) from problem
        content = torch.empty(0, dtype=torch.uint8, device=opened.device)
        return content.set_(opened, 0, (storage.size,), (1,))

    def settle(self) -> None:
        """Wait for this thread's copies, as `Card.settle`."""
        torch.cuda.current_stream(self.device).synchronize()


def card_of(device: Any) -> Card:
    """Return the card that a model is on. Raises `WeightUpdateError` for a CPU."""
    if device.type != "cuda":
        raise WeightUpdateError(
            f"the model is on {device.type!r}; memory of a card can only be lent to an engine on "
            "the same card. Send weights over a group, or as safetensors."
        )
    resolved = torch.device(device)
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    return CudaCard(torch.device("cuda", index))
