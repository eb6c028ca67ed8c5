"""NCCL without `torch.distributed`: a communicator made from a unique id, as vLLM's PyNccl makes
it. The library is called through ctypes, without blocking, so that every wait has a deadline.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nano_inference.errors import WeightTransferError
from nano_inference.parallel.deadline import Deadline

UNIQUE_ID_BYTES = 128
LIBRARY = "NANO_INFERENCE_NCCL"  # environment variable with the library's path
_DEFAULT = "libnccl.so.2"  # torch has loaded its own by this name
_SUCCESS, _IN_PROGRESS = 0, 7
_SUM, _FLOAT32, _BYTES = 0, 7, 1  # values in nccl.h: ncclSum, ncclFloat32, ncclUint8
_LOOK = 1e-4  # seconds between checks of an operation
_MAGIC, _CONFIG_VERSION, _UNSET = 0xCAFEBEEF, 21700, -(2**31)


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which is passed by value."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """`ncclConfig_t` of NCCL 2.17. Later versions append fields, and take shorter ones."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    ]


_COMM, _STREAM, _BUFFER = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
_INT, _SIZE = ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRankConfig": [
        *(ctypes.POINTER(_COMM), _INT, UniqueId, _INT, ctypes.POINTER(_Config))
    ],
    "ncclBroadcast": [_BUFFER, _BUFFER, _SIZE, _INT, _INT, _COMM, _STREAM],
    "ncclAllReduce": [_BUFFER, _BUFFER, _SIZE, _INT, _INT, _COMM, _STREAM],
    "ncclCommGetAsyncError": [_COMM, ctypes.POINTER(_INT)],
    "ncclCommAbort": [_COMM],
}


@cache
def library() -> Any:
    """Return the library, with the types of its functions. Raises `WeightTransferError`."""
    path = os.environ.get(LIBRARY, _DEFAULT)
    try:
        loaded = ctypes.CDLL(path)
        for name, types in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, _INT
        loaded.ncclGetErrorString.argtypes = [_INT]
        loaded.ncclGetErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError) as problem:
        raise WeightTransferError(
            f"NCCL cannot be loaded from {path!r}; install a build of torch with NCCL 2.17 or "
            f"later, or set {LIBRARY}."
        ) from problem
    return loaded


def unique_id() -> bytes:
    """Return a new id for `Communicator`. Its maker serves the meeting of the ranks."""
    made = UniqueId()
    _check(library().ncclGetUniqueId(ctypes.byref(made)), "an id cannot be made")
    return bytes(made)


class Communicator:
    """Ranks that were made from one unique id, including this one. Connects them.

    All ranks call the same collectives in the same order.

    Args:
        content: The id, 128 bytes.
        rank, size: This rank, and the number of ranks.
        device: Device of the tensors: a CUDA device with an index.
        deadline: Deadline for the other ranks to connect.
        alive: Function that raises `WeightTransferError` if another rank is gone, which NCCL itself
            may not notice. Called while this rank waits.

    Raises:
        WeightTransferError: A rank is missing at the deadline, or NCCL failed.
    """

    def __init__(
        self,
        content: bytes,
        rank: int,
        size: int,
        device: torch.device,
        deadline: Deadline,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._alive = alive
        self._library, self._comm = library(), _COMM()
        self._closing = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        config = _Config(
            ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0, _UNSET, _UNSET, _UNSET, None
        )
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                result = self._library.ncclCommInitRankConfig(
                    ctypes.byref(self._comm),
                    size,
                    UniqueId.from_buffer_copy(content),
                    rank,
                    ctypes.byref(config),
                )
            _check(result, "the ranks cannot connect")
            self._settle(deadline, f"the {size} ranks of the group did not connect")
        except BaseException:
            self.abort()
            raise

    def broadcast(self, tensor: Tensor, root: int, deadline: Deadline, what: str) -> "Queued":
        """Queue the copy of a contiguous tensor from the rank `root` to all ranks.

        Raises `WeightTransferError`. `what` names the tensor in messages.
        """
        pointer = tensor.data_ptr()
        arguments = (pointer, pointer, tensor.nbytes, _BYTES, root)
        return self._queue("ncclBroadcast", arguments, tensor, deadline, what)

    def warm_up(self, deadline: Deadline) -> None:
        """Sum one float32 over all ranks and wait for it, as PyNccl does before its first
        broadcast.
        """
        one = torch.zeros(1, device=self.device)
        arguments = (one.data_ptr(), one.data_ptr(), 1, _FLOAT32, _SUM)
        what = "the first message of the group"
        self.wait(self._queue("ncclAllReduce", arguments, one, deadline, what), deadline, what)

    def wait(self, queued: "Queued", deadline: Deadline, what: str) -> None:
        """Wait for a collective. Raises `WeightTransferError` at the deadline, if another rank is
        gone, or if NCCL failed. `what` names it in messages.
        """
        while not queued.is_done():
            deadline.check(f"{what} did not arrive")
            self._alive()
            time.sleep(deadline.at_most(_LOOK))

    def check(self) -> bool:
        """Return True if no call is in progress. Raises `WeightTransferError` if the group has
        failed or was closed.
        """
        state = _INT(_SUCCESS)
        with self._closing:
            if not self._comm:
                raise WeightTransferError("the group of trainer and engines was closed.")
            result = self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state))
        _check(result, "the state of the group is unknown")
        _check(state.value, "the group failed")
        return state.value == _SUCCESS

    def abort(self) -> None:
        """End the group on this rank. Collectives in progress end with an error on every rank."""
        with self._closing:
            comm, self._comm = self._comm, _COMM()
            if comm:
                self._library.ncclCommAbort(comm)

    def _queue(
        self, name: str, arguments: tuple[int, ...], tensor: Tensor, deadline: Deadline, what: str
    ) -> "Queued":
        stream = self._stream
        if stream is not None:  # the memory may be in use by this thread's stream
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._closing:
            if not self._comm:
                raise WeightTransferError("the group of trainer and engines was closed.")
            result = getattr(self._library, name)(
                *arguments, self._comm, 0 if stream is None else stream.cuda_stream
            )
        _check(result, f"{what} cannot be sent")
        self._settle(deadline, f"{what} was not queued")
        event = None if stream is None else stream.record_event()
        return Queued(self, event, tensor)

    def _settle(self, deadline: Deadline, what: str) -> None:
        while not self.check():
            deadline.check(what)
            self._alive()
            time.sleep(deadline.at_most(_LOOK))


class Queued:
    """Collective that was queued. It holds its tensor.

    Args:
        communicator: Communicator that runs it.
        event: CUDA event after it. None without a stream.
        tensor: Its tensor.
    """

    def __init__(self, communicator: Communicator, event: Any, tensor: Tensor) -> None:
        self._communicator, self._event, self._tensor = communicator, event, tensor

    def is_done(self) -> bool:
        """Return True if the tensor is complete. Raises `WeightTransferError` if the group has
        failed.
        """
        self._communicator.check()
        return self._event is None or self._event.query()


def _check(result: int, what: str) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        reason = library().ncclGetErrorString(result).decode(errors="replace")
        raise WeightTransferError(f"{what}: NCCL reports {reason!r}.")
