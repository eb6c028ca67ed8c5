"""Groups that a trainer makes with vLLM's `StatelessProcessGroup` and `PyNcclCommunicator`, as TRL,
prime-rl, PipelineRL and OpenRLHF do.

The trainer serves a `TCPStore` and puts a pickled `ncclUniqueId` into it. The pickle is read by
`system/pickles.py`, which executes nothing. All ranks then connect and sum one number.
"""

import socket
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nano_inference.errors import InvalidRequest, WeightTransferError, WeightUpdateError
from nano_inference.parallel.deadline import Deadline
from nano_inference.parallel.nccl import UNIQUE_ID_BYTES, Communicator, Queued
from nano_inference.parallel.process_group import first_line
from nano_inference.system.pickles import Called, read_pickle
from nano_inference.weights.transports.addresses import Address
from nano_inference.weights.transports.broadcast import check_ranks
from nano_inference.weights.transports.rendezvous import join_store
from nano_inference.weights.transports.trainer_broadcasts import (
    TrainerGroup,
    is_open,
    watch_trainer,
)

KEY = "broadcast_from/0/0"  # key of the first object that rank 0 of a StatelessProcessGroup sends
_UNPICKLE = "_ctypes._unpickle"
_ID_CLASSES = (
    "vllm.distributed.device_communicators.pynccl_wrapper.ncclUniqueId",
    "sglang.srt.distributed.device_communicators.pynccl_wrapper.ncclUniqueId",
)
_MOST_PICKLE = 4096  # bytes
_LOOK = 0.01  # seconds between checks for the id


class PyncclGroup:
    """Engine's end of a group of PyNccl, with the interface of `ProcessGroup` that broadcasts
    need.

    Args:
        communicator: Connected ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.device = communicator.device
        self._communicator = communicator

    def begin_broadcast(self, tensor: Tensor, deadline: Deadline, what: str) -> Queued:
        """Start to receive a tensor from the trainer. Pass the result to `wait`."""
        return self._communicator.broadcast(tensor, 0, deadline, what)

    def wait(self, works: Iterable[Queued], what: str, deadline: Deadline) -> None:
        """Wait for broadcasts. Raises `WeightTransferError` at the deadline, if the trainer is
        gone, or if NCCL failed.
        """
        for work in works:
            self._communicator.wait(work, deadline, what)

    def close(self) -> None:
        """Leave the group without a wait: an abort waits for kernels in progress."""
        end = self._communicator.abort
        threading.Thread(target=end, name="end of a group", daemon=True).start()


def join_pynccl(
    address: Address | None,
    rank: int,
    world_size: int,
    deadline: Deadline,
    device: torch.device,
    unique_id: bytes | None = None,
) -> TrainerGroup:
    """Join a trainer's group of PyNccl.

    Args:
        address: Host and port of the trainer's store. None if `unique_id` is known.
        rank: Rank of this engine, from 1 on.
        world_size: Number of ranks: the trainer and all engines.
        deadline: Deadline for all ranks to join.
        device: CUDA device of received tensors.
        unique_id: Id of NCCL, 128 bytes. None: the trainer's store has it.

    Raises:
        WeightUpdateError: The id has another form than vLLM's.
        WeightTransferError: The trainer or a rank is missing at the deadline.
    """
    check_ranks(rank, world_size)
    store = watch = None
    if unique_id is None:
        if address is None:
            raise WeightUpdateError("a group needs the address of a store, or an id of NCCL.")
        store = join_store(address, world_size, deadline)
        watch = watch_trainer(address, deadline)
    try:
        content = read_unique_id(store, deadline) if unique_id is None else unique_id
        alive = partial(_require_trainer, watch)
        communicator = Communicator(content, rank, world_size, device, deadline, alive)
        try:
            communicator.warm_up(deadline)
        except BaseException:
            communicator.abort()
            raise
    except BaseException:
        if watch is not None:
            watch.close()
        raise
    return TrainerGroup(PyncclGroup(communicator), watch)


def _require_trainer(watch: socket.socket | None) -> None:
    if watch is not None and not is_open(watch):
        raise WeightTransferError("the trainer's store has closed the connection.")


def read_unique_id(store: Any, deadline: Deadline) -> bytes:
    """Wait for the trainer's id in its store, and return its 128 bytes. Raises
    `WeightUpdateError`.
    """
    try:
        while not store.check([KEY]):
            deadline.check(
                f"the trainer's store got no id of NCCL at {KEY!r}, as vLLM's PyNcclCommunicator "
                "sends"
            )
            time.sleep(deadline.at_most(_LOOK))
        content = bytes(store.get(KEY))
    except RuntimeError as problem:
        raise WeightTransferError(f"lost the trainer: {first_line(problem)}") from problem
    return id_in(content)


def id_in(content: bytes) -> bytes:
    """Return the id in a pickled `ncclUniqueId`, or in pickled bytes as of NCCL's own package.
    Raises `WeightUpdateError`.
    """
    what = "the trainer's id of NCCL"
    if len(content) > _MOST_PICKLE:
        raise WeightUpdateError(f"{what} has {len(content)} bytes; it may have {_MOST_PICKLE}.")
    try:
        value = read_pickle(content, (_UNPICKLE, *_ID_CLASSES), what)
    except InvalidRequest as problem:
        raise WeightUpdateError(str(problem)) from problem
    # a ctypes structure: _unpickle(class, (attributes, memory))
    if isinstance(value, Called) and value.name == _UNPICKLE and len(value.arguments) == 2:
        state = value.arguments[1]
        value = state[1] if isinstance(state, tuple) and len(state) == 2 else None
    if not isinstance(value, bytes) or len(value) != UNIQUE_ID_BYTES:
        raise WeightUpdateError(
            f"{what} must be {UNIQUE_ID_BYTES} bytes, plain or in an ncclUniqueId of vLLM's PyNccl."
        )
    return value
