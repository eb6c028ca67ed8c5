"""Memory of a card that keeps its addresses while its contents are on the host, or dropped.

Weights and KV cache of a CUDA engine each have a pool: addresses of the size of the card, to whose
beginning memory is mapped as tensors are allocated. A sleep unmaps the memory and keeps the
addresses, so captured graphs stay valid. Tensors are views of raw addresses through
`__cuda_array_interface__`: torch keeps a reference to the object that has it, without an allocator
in C and without callbacks into Python.
"""

import math
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nano_inference.core.failures import DeviceHangs
from nano_inference.device.driver import CudaDriver, DriverError, DriverLacksMemory, NoVirtualMemory
from nano_inference.types import Memory

ALIGNMENT = 512  # bytes, as in torch's allocator
PIECE = 2**28  # maximum bytes that are allocated, copied and freed together


class CardFull(torch.OutOfMemoryError):
    """Memory that a pool needs and the card does not have.

    Args:
        needed, free: Bytes.

    Attributes:
        missing: Bytes that other programs have to free.
    """

    def __init__(self, needed: int, free: int) -> None:
        self.missing = max(needed - free, 1)
        super().__init__(
            f"{self.missing:,} bytes of the card's memory are missing: {needed:,} are needed, and "
            f"{free:,} are free"
        )


@dataclass
class _Piece:
    """Addresses whose memory is allocated together, and the copy of their contents.

    Attributes:
        address, size: Addresses in bytes.
        is_mapped: True if there is memory at the addresses.
        saved: Address of the pinned copy, or 0.
    """

    address: int
    size: int
    is_mapped: bool = True
    saved: int = 0


class _Addresses:
    """Reserved addresses, which live as long as a pool or one of its tensors."""

    def __init__(self, driver: CudaDriver, size: int) -> None:
        self.driver, self.size = driver, size
        self.pieces: list[_Piece] = []
        self.first = driver.reserve(size)
        close = weakref.finalize(self, _close, driver, self.first, size, self.pieces)
        close.atexit = False  # the driver cleans up after a process
        self.close = close


def _close(driver: CudaDriver, first: int, size: int, pieces: list[_Piece]) -> None:
    """Free memory, copies and addresses. A failed card rejects that, and frees them with the
    process.
    """
    with suppress(DriverError):
        driver.synchronise()
    for piece in pieces:
        with suppress(DriverError):
            _unmap(driver, [piece])
        with suppress(DriverError):
            _unpin(driver, piece)
    with suppress(DriverError):
        driver.free_addresses(first, size)


class _View:
    """Bytes at a raw address, for torch (on a card) and numpy (in tests)."""

    def __init__(self, addresses: _Addresses, address: int, size: int) -> None:
        self._addresses = addresses
        self.__cuda_array_interface__ = self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Pool:
    """Memory that tensors are allocated from, and that can be given to the card and taken again.

    Single tensors are not freed: the memory is, after the pool and all of its tensors are gone.

    Args:
        driver: Virtual memory of the card.
        device: Device of the tensors.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver, self._device = driver, device
        self._addresses = _Addresses(driver, _multiple(driver.total, driver.granularity))
        self._used = 0  # bytes of the addresses that tensors take

    @property
    def size(self) -> int:
        """Bytes of the card that the pool takes while it is awake."""
        return sum(piece.size for piece in self._addresses.pieces)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized tensor. Raises `CardFull`, with nothing allocated."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device=self._device)
        start = _multiple(self._used, ALIGNMENT)
        self._grow(start + size)
        self._used = start + size
        view: Any = _View(self._addresses, self._addresses.first + start, size)
        on_card = self._device.type == "cuda"
        whole = (
            torch.as_tensor(view, device=self._device)
            if on_card
            else torch.from_numpy(np.asarray(view))
        )
        return whole.view(dtype).view(shape)

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor was allocated from this pool."""
        start = tensor.data_ptr() - self._addresses.first
        return not tensor.nbytes or 0 <= start < self._addresses.size

    def save(self) -> None:
        """Copy the contents to pinned memory, which stays for the next sleep.

        Raises `OSError` if the host lacks memory, with nothing changed.
        """
        pieces = self._addresses.pieces
        try:
            for piece in pieces:
                piece.saved = piece.saved or self._driver.pin(piece.size)
        except DriverLacksMemory as problem:
            self.forget()
            raise OSError(f"the host cannot pin {self.size:,} bytes for them") from problem
        for piece in pieces:
            self._driver.queue_out(piece.saved, piece.address, piece.size)
        self._driver.wait()

    def release(self) -> None:
        """Give the memory to the card. The addresses stay, and reading them is an error."""
        self._driver.synchronise()
        _unmap(self._driver, self._addresses.pieces)

    def regain(self) -> None:
        """Map memory to the same addresses, with unknown contents.

        Raises `CardFull`. The pool then has no memory, as before.
        """
        gone = [piece for piece in self._addresses.pieces if not piece.is_mapped]
        needed = sum(piece.size for piece in gone)
        if needed > self._driver.free:
            torch.cuda.empty_cache()  # memory that this process caches
        if needed > self._driver.free:
            raise CardFull(needed, self._driver.free)
        try:
            for piece in gone:
                self._driver.map(piece.address, piece.size)
                piece.is_mapped = True
        except DriverLacksMemory:  # others took it meanwhile
            _unmap(self._driver, gone)
            raise CardFull(needed, self._driver.free) from None

    def restore(self) -> None:
        """Copy the saved contents back."""
        for piece in self._addresses.pieces:
            self._driver.queue_in(piece.address, piece.saved, piece.size)
        self._driver.wait()

    def forget(self) -> None:
        """Free the pinned copies."""
        for piece in self._addresses.pieces:
            _unpin(self._driver, piece)

    def close(self) -> None:
        """Free the memory and the addresses. No tensor may be used afterwards."""
        self._addresses.close()

    def _grow(self, size: int) -> None:
        """Map memory until the first `size` bytes have some. Raises `CardFull`."""
        pieces, first, begin = self._addresses.pieces, self._addresses.first, self.size
        missing = _multiple(max(size - begin, 0), self._driver.granularity)
        before = len(pieces)
        try:
            for start in range(begin, begin + missing, PIECE):
                part = min(begin + missing - start, PIECE)
                self._driver.map(first + start, part)
                pieces.append(_Piece(first + start, part))
        except DriverError as problem:
            _unmap(self._driver, pieces[before:])
            del pieces[before:]
            if not isinstance(problem, DriverLacksMemory):
                raise
            raise CardFull(missing, self._driver.free) from None


def _unmap(driver: CudaDriver, pieces: Iterable[_Piece]) -> None:
    for piece in pieces:
        if piece.is_mapped:
            driver.unmap(piece.address, piece.size)
            piece.is_mapped = False


def _unpin(driver: CudaDriver, piece: _Piece) -> None:
    if piece.saved:
        saved, piece.saved = piece.saved, 0
        driver.unpin(saved)


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


class EnginePools:
    """Pools of one engine.

    Args:
        driver: Virtual memory of the card.
        device: Device of the engine.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._by_memory: dict[Memory, Pool] = {
            "weights": Pool(driver, device),
            "kv_cache": Pool(driver, device),
        }

    @property
    def weights(self) -> Pool:
        """Pool of the weights of all models."""
        return self["weights"]

    @property
    def kv_cache(self) -> Pool:
        """Pool of the KV tensors."""
        return self["kv_cache"]

    def __getitem__(self, memory: Memory) -> Pool:
        return self._by_memory[memory]

    def close(self) -> None:
        """Free all memory and addresses. No tensor may be used afterwards."""
        for pool in self._by_memory.values():
            pool.close()


def pools_of(device: torch.device) -> EnginePools | None:
    """Return the pools of an engine, after a trial of every call that a sleep makes. Return None
    for a CPU, whose memory keeps its addresses without them.

    Raises `NoVirtualMemory` with the reason if the driver or the card cannot keep addresses.
    """
    if device.type != "cuda":
        return None
    try:
        driver = CudaDriver(torch.cuda.current_device() if device.index is None else device.index)
        _try(driver, device)
        return EnginePools(driver, device)
    except (RuntimeError, OSError, DeviceHangs) as problem:
        raise NoVirtualMemory(str(problem)) from problem


def _try(driver: CudaDriver, device: torch.device) -> None:
    """Put a tensor to sleep and wake it. Raises `RuntimeError` if it loses its contents."""
    pool = Pool(driver, device)
    try:
        trial = pool.take((1000,), torch.int32)
        trial.copy_(torch.arange(1000))
        address, expected = trial.data_ptr(), trial.clone()
        driver.synchronise()
        pool.save()
        pool.release()
        pool.regain()
        pool.restore()
        if trial.data_ptr() != address or not torch.equal(trial, expected):
            raise RuntimeError("a tensor lost its contents in a trial of a sleep")
    finally:
        pool.close()
