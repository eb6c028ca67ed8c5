"""`HostCard`: a card whose memory is this machine's shared memory, for `tests.server.trainers.lender`."""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nano_inference.errors import WeightTransferError
from nano_inference.parallel.shared_tensors import SharedStorage
from tests.server.trainers.lender import CARD, SHARED


class HostCard:
    """Card as the engine sees it.

    Attributes:
        opened: Mapped files.
        on_open: Called whenever a handle is opened.
    """

    uuid = f"GPU-{CARD.upper()}"  # another spelling than the trainer's

    def __init__(self) -> None:
        self.opened: list[mmap.mmap] = []
        self.num_settled = 0
        self.on_open: Callable[[], object] = lambda: None

    def open(self, storage: SharedStorage) -> Tensor:
        path = SHARED / storage.handle[2:].rstrip(b"\0").decode()
        try:
            with path.open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
        except OSError as problem:
            raise WeightTransferError("the memory cannot be opened: invalid handle") from problem
        self.opened.append(mapped)
        self.on_open()
        # torch keeps the lease, and the lease the mapping: `frombuffer` of a mapping would not
        lease: Any = (ctypes.c_uint8 * len(mapped)).from_buffer(mapped)
        content = torch.frombuffer(lease, dtype=torch.uint8)
        return content[storage.offset : storage.offset + storage.size]

    def settle(self) -> None:
        self.num_settled += 1

    def close_all(self) -> int:
        """Close the mapped files and return their number. Raises `BufferError` if one is in use."""
        count = len(self.opened)
        while self.opened:
            self.opened.pop().close()
        return count
