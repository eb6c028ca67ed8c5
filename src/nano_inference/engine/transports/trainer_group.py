"""An engine in a trainer's own `torch.distributed` group: rank 0 is the trainer, and the store that all meet at is its.

Two ways of making such a group are known. An ordinary one is the first `init_process_group` of the trainer's process.
A named one stands beside it, as trainers of the SGLang kind make it: by a rendezvous of its own, whose store gets the
group's name as prefix, and torch's `_new_process_group_helper(..., group_name=name)`, which puts the name and the
device in front once more (seen with torch 2.11 and 2.13).
"""

import socket
from typing import Literal

import torch

from nano_inference.engine.transports.group import (
    Address,
    Group,
    check_backend,
    default_room,
    device_room,
    join_group,
    join_store,
)
from nano_inference.engine.transports.interface import Deadline
from nano_inference.errors import WeightTransferError, WeightUpdateError

Kind = Literal["ordinary", "named"]


class TrainerGroup:
    """A group that was joined; made by `join_trainer`.

    Attributes:
        group: for collectives.
        rank: of this engine.
        world_size: trainer and engines.
    """

    def __init__(self, group: Group, rank: int, world_size: int, watch: socket.socket) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self._watch = watch

    def trainer_lives(self) -> bool:
        """Whether the process that serves the store is there; one that was stopped is."""
        return _is_open(self._watch)

    def close(self) -> None:
        """Leave. What is under way fails on every side."""
        self.group.close()
        self._watch.close()


def join_trainer(
    address: Address,
    rank: int,
    world_size: int,
    deadline: Deadline,
    *,
    backend: str = "gloo",
    device: torch.device | None = None,
    name: str | None = None,
) -> TrainerGroup:
    """Meet the trainer at its store.

    Args:
        address: host and port of the store.
        rank: of this engine, from 1 on.
        world_size: the trainer and all engines.
        deadline: by which all of them must be there.
        backend: "gloo" or "nccl".
        device: where what is received must lie; None: the CPU with gloo, the current CUDA device with NCCL.
        name: of a named group; None: an ordinary one.

    Raises `WeightUpdateError`; `WeightTransferError` if they are not there in time.
    """
    if not 1 <= rank < world_size:
        raise WeightUpdateError(f"rank={rank} must be from 1 to world_size - 1 = {world_size - 1}; 0 is the trainer.")
    check_backend(backend)
    device = device or torch.device("cuda" if backend == "nccl" else "cpu")
    store = join_store(address, world_size, deadline)
    watch = _watch(address, deadline)
    try:
        room = default_room(backend) if name is None else f"{name}/{device_room(name, backend)}"
        made = join_group(store, room, rank, world_size, backend, device, watch.getsockname()[0], deadline)
    except BaseException:
        watch.close()
        raise

    def alive() -> None:
        if not _is_open(watch):
            raise RuntimeError("its store has closed the connection")

    return TrainerGroup(Group(made, device, alive), rank, world_size, watch)


def _watch(address: Address, deadline: Deadline) -> socket.socket:
    """A connection to the store that nothing is ever sent over: it ends with the trainer's process.

    Its own end has the address of this machine that the trainer reaches. To ask the store something instead would wait
    for a trainer that is stopped, without a limit.
    """
    try:
        return socket.create_connection(address, timeout=max(deadline.left(), 0.001))
    except OSError as problem:
        raise WeightTransferError(f"the trainer at tcp://{address[0]}:{address[1]} is gone: {problem}") from problem


def _is_open(connection: socket.socket) -> bool:
    try:
        connection.setblocking(False)  # with a timeout Python would wait for it, flag or not
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:  # reset, or closed here
        return False
