"""Reused memory. Mapping new pages takes the system about as long as filling them."""

import ctypes
import weakref
from typing import Any

from nano_inference.arrays import HOST, Tensor, namespace
from nano_inference.ops.cpu.memory import HUGE_PAGE, advise_huge_pages, populate


class ReusedMemory:
    """Pool of memory blocks. A block returns to the pool when the last tensor on it is freed."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, num_bytes: int, slack: int = 0, device: Any = HOST) -> Tensor:
        """Return an uninitialized array, uint8 [num_bytes + slack]: a torch tensor if `device` is
        torch's. From 2 MiB on, it reuses earlier CPU memory, if any. On GPUs, torch manages the
        memory.

        Pages of the slack are mapped only when they are written.
        """
        xp = namespace(device)
        used, num_bytes = num_bytes, num_bytes + slack
        if used < HUGE_PAGE or device.type != "cpu":
            return xp.empty(num_bytes, dtype=xp.uint8, device=device)
        piece = self._find(num_bytes)
        if piece is None:
            piece = xp.empty(num_bytes, dtype=xp.uint8)
            advise_huge_pages(piece[:used])
            populate(piece[:used])
        kind: Any = type("Lease", (ctypes.c_uint8 * num_bytes,), {})
        lease = kind.from_address(piece.data_ptr())
        # both libraries keep the lease alive while a tensor uses the memory
        weakref.finalize(lease, self._free.append, piece).atexit = False
        return xp.frombuffer(lease, dtype=xp.uint8)

    def forget(self) -> None:
        """Release unused memory to the system."""
        self._free.clear()

    def _find(self, num_bytes: int) -> Tensor | None:
        """Return the smallest free block that is large enough, but less than twice as large."""
        fitting = [
            (len(p), at) for at, p in enumerate(self._free) if num_bytes <= len(p) < 2 * num_bytes
        ]
        # in place, because leases append to this list
        return self._free.pop(min(fitting)[1]) if fitting else None
