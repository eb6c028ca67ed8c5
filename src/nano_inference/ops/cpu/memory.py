"""Memory in huge pages, if the system has them: reading weights then needs fewer page table
walks.
"""

import contextlib
import ctypes
import errno
import math
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from nano_inference.arrays import (
    HOST,
    Device,
    Dtype,
    HostArray,
    Tensor,
    as_torch,
    dtype_name,
    host,
    namespace,
)

CHUNK = 2**26  # bytes requested from the system in one mapping
HUGE_PAGE = 2**21
ALIGNMENT = 64


class Arena:
    """Allocator of pieces of large mappings. A mapping lives as long as one of its tensors."""

    def __init__(self) -> None:
        self._newest: Callable[[], HostArray | None] = lambda: None  # a weak reference
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
        """Allocate zeros: a host array or a tensor, as `dtype` is numpy's or torch's."""
        size = math.prod(shape) * dtype.itemsize
        whole = self._newest()
        if whole is None or self._used + size > len(whole):
            whole = _mapping(max(size, CHUNK) + HUGE_PAGE)
            self._newest, self._used = weakref.ref(whole), -whole.data_ptr() % HUGE_PAGE
        piece = whole[self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        piece = piece if isinstance(dtype, np.dtype) else as_torch(piece)
        return piece.view(dtype).reshape(shape)


class RecordedArena(Arena):
    """Allocator that remembers its host arrays, in the order of allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[HostArray] = []

    def take(self, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
        """Allocate and remember zeros."""
        piece = super().take(shape, dtype)
        self.pieces.append(cast("HostArray", piece))
        return piece


class MappedArena(Arena):
    """Allocator that hands out the pieces of a mapped file, in the order of their allocation by a
    `RecordedArena`. Writes to a piece do not change the file.

    Args:
        memory: Mapping of the file.
        start: Offset of the first piece. Each piece begins at a multiple of `ALIGNMENT` after it.
        pieces: Shape and name of the dtype of each piece.
    """

    def __init__(
        self, memory: mmap.mmap, start: int, pieces: Sequence[tuple[tuple[int, ...], str]]
    ) -> None:
        self._chunk = host.frombuffer(memory, dtype=host.uint8)[start:]
        self._pieces, self._used = deque(pieces), 0
        populate_read(self._chunk)

    def take(self, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
        """Return the next piece. Raise `ValueError` if it has another shape or dtype."""
        if not self._pieces or self._pieces[0] != (shape, dtype_name(dtype)):
            raise ValueError(f"the file has no piece {dtype_name(dtype)} {shape} at this place.")
        self._pieces.popleft()
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > len(self._chunk):
            raise ValueError("the file is too short for its pieces.")
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return piece.view(dtype).reshape(shape)


def reserve(shape: tuple[int, ...], dtype: Dtype, device: Device) -> Tensor:
    """Return uninitialized memory for a cache, of which often a small part is used.

    On the host, pages are allocated at their first write and are never huge: the first tokens of
    every layer and head would otherwise take a huge page each.
    """
    if device is not HOST:
        return namespace(device).empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = _map(max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return host.frombuffer(memory, dtype=host.uint8)[:size].view(dtype).reshape(shape)


def advise_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for a large tensor that was just allocated. Without huge pages this does
    nothing.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(tensor, mmap.MADV_HUGEPAGE)


def discard(tensor: Tensor) -> None:
    """Return the pages of a large tensor to the system. The tensor keeps its address and loses its
    contents.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        _advise(tensor, mmap.MADV_DONTNEED)


def populate(tensor: Tensor) -> None:
    """Allocate the pages of a tensor now instead of at their first write."""
    if sys.platform == "linux" and tensor.device.type == "cpu":
        # MADV_POPULATE_WRITE, which Linux before 5.14 rejects: pages are allocated later
        _advise(tensor, 23)


def populate_read(tensor: Tensor) -> None:
    """Map the pages of a file now instead of at their first read."""
    if sys.platform == "linux":
        _advise(tensor, 22)  # MADV_POPULATE_READ, which Linux before 5.14 rejects


def _advise(tensor: Tensor, advice: int) -> None:
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def _mapping(size: int) -> HostArray:
    memory = _map(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return host.frombuffer(memory, dtype=host.uint8)


def _map(size: int) -> mmap.mmap:
    try:  # shared mappings get no huge pages
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as problem:
        if problem.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{size} bytes cannot be mapped: not enough memory") from None
