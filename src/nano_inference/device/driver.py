"""Virtual memory of a card through the CUDA driver: reserved addresses, and memory mapped to them.

The driver is called through ctypes, because torch has no interface for it. See "Virtual Memory
Management" in the CUDA driver API.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from nano_inference.device.queues import DEADLINE, Event, wait_for
from nano_inference.errors import NanoInferenceError

LIBRARY = "libcuda.so.1"
# values in cuda.h
_SUCCESS, _OUT_OF_MEMORY, _NOT_READY = 0, 2, 600
_HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED, _ON_DEVICE, _READ_WRITE, _NON_BLOCKING = 1, 1, 3, 1


class NoVirtualMemory(NanoInferenceError):
    """Driver or card that cannot unmap memory and keep its addresses."""


class DriverError(RuntimeError):
    """Call that the driver rejected. The message begins with "CUDA driver error"."""


class DriverLacksMemory(DriverError):
    """Memory that the driver cannot allocate, on the card or pinned on the host."""


class _Location(ctypes.Structure):
    """Structure `CUmemLocation`, a card."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Allocation(ctypes.Structure):
    """Structure `CUmemAllocationProp`, a kind of memory."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    """Structure `CUmemAccessDesc`, a right to read and write."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_INT, _SIZE, _LONG, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_void_p
_ADDRESS = ctypes.c_ulonglong  # CUdeviceptr, CUmemGenericAllocationHandle
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [ctypes.POINTER(_INT), _INT],
    "cuDeviceGetAttribute": [ctypes.POINTER(_INT), _INT, _INT],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_POINTER), _INT],
    "cuCtxPushCurrent_v2": [_POINTER],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(_POINTER)],
    "cuCtxSynchronize": [],
    "cuMemGetInfo_v2": [ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)],
    "cuMemGetAllocationGranularity": [*(ctypes.POINTER(_SIZE), ctypes.POINTER(_Allocation), _INT)],
    "cuMemAddressReserve": [ctypes.POINTER(_ADDRESS), _SIZE, _SIZE, _ADDRESS, _LONG],
    "cuMemAddressFree": [_ADDRESS, _SIZE],
    "cuMemCreate": [ctypes.POINTER(_ADDRESS), _SIZE, ctypes.POINTER(_Allocation), _LONG],
    "cuMemRelease": [_ADDRESS],
    "cuMemMap": [_ADDRESS, _SIZE, _SIZE, _ADDRESS, _LONG],
    "cuMemSetAccess": [_ADDRESS, _SIZE, ctypes.POINTER(_Access), _SIZE],
    "cuMemUnmap": [_ADDRESS, _SIZE],
    "cuMemHostAlloc": [ctypes.POINTER(_POINTER), _SIZE, ctypes.c_uint],
    "cuMemFreeHost": [_POINTER],
    "cuStreamCreate": [ctypes.POINTER(_POINTER), ctypes.c_uint],
    "cuStreamQuery": [_POINTER],
    "cuMemcpyDtoHAsync_v2": [_POINTER, _ADDRESS, _SIZE, _POINTER],
    "cuMemcpyHtoDAsync_v2": [_ADDRESS, _POINTER, _SIZE, _POINTER],
    "cuGetErrorName": [_INT, ctypes.POINTER(ctypes.c_char_p)],
}


@cache
def _library(path: str) -> Any:
    """Return the library, with the types of its functions. Raises `NoVirtualMemory`."""
    try:
        loaded = ctypes.CDLL(path)
    except OSError as problem:
        raise NoVirtualMemory(f"the CUDA driver {path!r} cannot be loaded") from problem
    for name, types in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is None:
            raise NoVirtualMemory(f"the CUDA driver is too old: it lacks {name}")
        function.argtypes, function.restype = types, _INT
    return loaded


class CudaDriver:
    """Virtual memory of one card.

    Args:
        index: Index of the card, as torch counts.
        library: Path of the driver's library.

    Attributes:
        granularity: Bytes whose multiples addresses and sizes are.
        total: Bytes of the card's memory.

    Raises `NoVirtualMemory`.
    """

    def __init__(self, index: int, library: str = LIBRARY) -> None:
        self._library = _library(library)
        device, supported, self._context = _INT(), _INT(), _POINTER()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetAttribute", ctypes.byref(supported), _HAS_VIRTUAL_MEMORY, device)
        if not supported.value:
            raise NoVirtualMemory("the card has no virtual memory management")
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._location = _Location(_ON_DEVICE, device.value)
        self._allocation = _Allocation(type=_PINNED, location=self._location)
        granularity, stream = _SIZE(), _POINTER()
        with self._current():
            self._call(
                *("cuMemGetAllocationGranularity", ctypes.byref(granularity)),
                *(ctypes.byref(self._allocation), 0),
            )
            self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        self.granularity, self._stream = granularity.value, stream
        self.total = self._memory()[1]

    @property
    def free(self) -> int:
        """Bytes of the card that no process uses."""
        return self._memory()[0]

    def reserve(self, size: int) -> int:
        """Reserve addresses without memory. Return the first."""
        address = _ADDRESS()
        with self._current():
            self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value

    def free_addresses(self, address: int, size: int) -> None:
        """Give reserved addresses back. No memory may be mapped to them."""
        with self._current():
            self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> None:
        """Allocate memory, uninitialized, and map it to reserved addresses.

        Raises `DriverLacksMemory`. After any error nothing is mapped or allocated.
        """
        handle, access = _ADDRESS(), _Access(self._location, _READ_WRITE)
        with self._current():
            self._call(
                *("cuMemCreate", ctypes.byref(handle), size),
                *(ctypes.byref(self._allocation), 0),
            )
            try:
                self._call("cuMemMap", address, size, 0, handle, 0)
            finally:
                # the mapping keeps the memory, which `unmap` then frees
                self._call("cuMemRelease", handle)
            try:
                self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
            except BaseException:
                self._call("cuMemUnmap", address, size)
                raise

    def unmap(self, address: int, size: int) -> None:
        """Free the memory of one call of `map`. Its addresses stay reserved."""
        with self._current():
            self._call("cuMemUnmap", address, size)

    def pin(self, size: int) -> int:
        """Allocate pinned memory of the host. Return its address. Raises `DriverLacksMemory`."""
        address = _POINTER()
        with self._current():
            self._call("cuMemHostAlloc", ctypes.byref(address), size, 0)
        return address.value or 0

    def unpin(self, address: int) -> None:
        """Free pinned memory."""
        with self._current():
            self._call("cuMemFreeHost", address)

    def queue_out(self, host: int, address: int, size: int) -> None:
        """Queue a copy from the card to pinned memory. `wait` completes it."""
        with self._current():
            self._call("cuMemcpyDtoHAsync_v2", host, address, size, self._stream)

    def queue_in(self, address: int, host: int, size: int) -> None:
        """Queue a copy from pinned memory to the card. `wait` completes it."""
        with self._current():
            self._call("cuMemcpyHtoDAsync_v2", address, host, size, self._stream)

    def wait(self) -> None:
        """Wait until all queued copies are done. Raises `DeviceHangs` or a driver's error."""
        wait_for(_Copies(self), DEADLINE)

    def synchronise(self) -> None:
        """Wait until the card has done all work of this process."""
        with self._current():
            self._call("cuCtxSynchronize")

    def is_idle(self) -> bool:
        """Return True if all queued copies are done. Raises the driver's error."""
        with self._current():
            code = self._library.cuStreamQuery(self._stream)
            if code == _NOT_READY:
                return False
            self._check("cuStreamQuery", code)
            return True

    def _memory(self) -> tuple[int, int]:
        free, total = _SIZE(), _SIZE()
        with self._current():
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make torch's context of this card current on the calling thread."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_POINTER()))

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code == _SUCCESS:
            return
        said = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(said))
        kind = DriverLacksMemory if code == _OUT_OF_MEMORY else DriverError
        raise kind(f"CUDA driver error: {name} returned {(said.value or b'?').decode()} ({code})")


class _Copies(Event):
    """Copies that a driver has queued."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def query(self) -> bool:
        return self._driver.is_idle()
