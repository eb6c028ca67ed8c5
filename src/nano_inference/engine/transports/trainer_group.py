"""An engine in a trainer's `torch.distributed` group: rank 0 is the trainer, and the store that all
meet at is its.

Two ways of making such a group are known. An ordinary one is the first `init_process_group` of the
trainer's process. A named one stands beside it, as trainers of the SGLang kind make it: by a
rendezvous of its own, whose store gets the group's name as prefix, and torch's
`_new_process_group_helper(..., group_name=name)`, which puts the name and the device in front once
more (so in torch 2.13, and in the sources of older ones).
"""

import socket

import torch

from nano_inference.engine.transports.broadcast import BroadcastReceiver, check_ranks
from nano_inference.engine.transports.group import (
    Address,
    Group,
    check_backend,
    default_room,
    device_for,
    device_room,
    join_group,
    join_store,
    url_of,
    when_served,
)
from nano_inference.engine.transports.interface import Deadline
from nano_inference.engine.transports.reuse import ReusedMemory
from nano_inference.engine.transports.unanswered import before

GRACE = 0.5  # seconds that the backend has to say itself who did not come


class TrainerGroup:
    """A group that a trainer made by itself, and that was joined by `join_trainer`.

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

    def stream(self, memory: ReusedMemory) -> BroadcastReceiver:
        """What takes the updates of a `WeightSender.over` this group."""
        return BroadcastReceiver.over(self.group, memory)

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
        device: where what is received must lie; None: the CPU with gloo, the current CUDA device
            with NCCL.
        name: of a named group; None: an ordinary one.

    Raises `WeightUpdateError`; `WeightTransferError` if they are not there in time.
    """
    check_ranks(rank, world_size)
    check_backend(backend)
    device = device_for(backend, device)
    store = join_store(address, world_size, deadline)
    watch = _watch(address, deadline)
    try:
        room = default_room(backend) if name is None else f"{name}/{device_room(name, backend)}"
        host = watch.getsockname()[0]
        # a store whose process was stopped keeps whoever asks it, whatever its deadline
        made = before(
            deadline,
            lambda: join_group(store, room, rank, world_size, backend, device, host, deadline),
            url_of(address),
            grace=GRACE,
        )
    except BaseException:
        watch.close()
        raise

    def alive() -> None:
        if not _is_open(watch):
            raise RuntimeError("its store has closed the connection")

    return TrainerGroup(Group(made, device, alive), rank, world_size, watch)


def _watch(address: Address, deadline: Deadline) -> socket.socket:
    """A connection to the store that nothing is ever sent over: it ends with the trainer's process.

    Its own end has the address of this machine that the trainer reaches. To ask the store something
    instead would wait for a trainer that is stopped, without a limit.
    """

    def connect() -> socket.socket:
        connection = socket.create_connection(address, timeout=deadline.at_most())
        connection.setblocking(False)
        _keep_alive(connection)
        return connection

    return when_served(address, deadline, connect)


def _keep_alive(connection: socket.socket) -> None:
    """Let the system ask now and then whether the other machine is still there: one that is cut off
    says no goodbye.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:  # reset, or closed here
        return False
