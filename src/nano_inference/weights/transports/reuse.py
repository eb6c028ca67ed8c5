"""Memory that is used again: to have the system find pages takes about as long as to fill them."""

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from nano_inference.ops.cpu.memory import HUGE_PAGE, advise_huge_pages, populate

CPU = torch.device("cpu")


class ReusedMemory:
    """Gives out pieces of memory. A piece comes back when the last tensor on it is gone."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, num_bytes: int, slack: int = 0, device: torch.device = CPU) -> Tensor:
        """A tensor uint8 [num_bytes + slack], not initialised. From 2 MiB on its memory is one that
        was used before, if any; of other devices torch itself keeps the memory. For the slack the
        system finds pages only when they are written to.
        """
        used, num_bytes = num_bytes, num_bytes + slack
        if used < HUGE_PAGE or device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        piece = self._find(num_bytes)
        if piece is None:
            piece = torch.empty(num_bytes, dtype=torch.uint8)
            advise_huge_pages(piece[:used])
            populate(piece[:used])
        kind: Any = type("Lease", (ctypes.c_uint8 * num_bytes,), {})
        lease = kind.from_address(piece.data_ptr())
        # torch holds the lease while it holds memory
        weakref.finalize(lease, self._free.append, piece).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def forget(self) -> None:
        """Give unused memory back to the system."""
        self._free.clear()

    def _find(self, num_bytes: int) -> Tensor | None:
        """The smallest free piece that is large enough, and not twice as large."""
        fitting = [
            (len(p), at) for at, p in enumerate(self._free) if num_bytes <= len(p) < 2 * num_bytes
        ]
        # in place: leases append to this very list
        return self._free.pop(min(fitting)[1]) if fitting else None
