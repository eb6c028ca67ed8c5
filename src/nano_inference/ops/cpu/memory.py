"""Memory in huge pages, where the system has them: reading weights then costs fewer walks of page
tables.
"""

import contextlib
import ctypes
import errno
import math
import mmap
import sys

import torch
from torch import Tensor

CHUNK = 2**26  # bytes taken from the system at once
HUGE_PAGE = 2**21
ALIGNMENT = 64


class Arena:
    """Gives out pieces of large mappings. A mapping lives as long as a tensor of it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _mapping(max(size, CHUNK)), 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return piece.view(dtype).view(shape)


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages behind a large tensor that was just allocated; nothing happens where there
    are none.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(tensor, mmap.MADV_HUGEPAGE)


def discard(tensor: Tensor) -> None:
    """Give the pages behind a large tensor back to the system. It keeps its address; what it held
    is lost.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        _advise(tensor, mmap.MADV_DONTNEED)


def populate(tensor: Tensor) -> None:
    """Let the system find memory behind a tensor now, not page by page when it is first written."""
    if sys.platform == "linux" and tensor.device.type == "cpu":
        _advise(tensor, 23)  # MADV_POPULATE_WRITE; kernels before 5.14 refuse it, and find it later


def _advise(tensor: Tensor, advice: int) -> None:
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def _mapping(size: int) -> Tensor:
    try:  # shared ones get no huge pages
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as problem:
        if problem.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{size} bytes cannot be mapped") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + size]
