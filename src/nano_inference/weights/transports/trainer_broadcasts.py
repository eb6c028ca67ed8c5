"""Broadcasts of a trainer that made the `torch.distributed` group itself: it is rank 0, and serves
the store that all meet at. Its tensors come in an order that it told by other means: one each, or
packed.

Two ways of making such a group are known. An ordinary one is the first `init_process_group` of the
trainer's process. A named one stands beside it, as trainers of the SGLang kind make it: by a
rendezvous of its own, whose store gets the group's name as prefix, and torch's
`_new_process_group_helper(..., group_name=name)`, which puts the name and the device in front once
more (so in torch 2.13, and in the sources of older ones).
"""

import secrets
import socket
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.parallel.deadline import before
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.weights.sources import BUCKET_BYTES, in_groups
from nano_inference.weights.transports.broadcast import GroupReceiver, check_ranks
from nano_inference.weights.transports.interface import Deadline, Incoming, Shapes, overlapped
from nano_inference.weights.transports.rendezvous import (
    Address,
    check_backend,
    default_room,
    device_for,
    device_room,
    join_group,
    join_store,
    url_of,
    when_served,
)
from nano_inference.weights.transports.reuse import ReusedMemory
from nano_inference.weights.transports.wire import ALIGNMENT, TensorInfo, tensor_of

GRACE = 0.5  # seconds that the backend has to say itself which rank did not come
CANARY = 8  # bytes
SLACK = 2**30  # bytes; of addresses, not of memory, until a rank writes there
Run = Sequence[TensorInfo]  # what travels by one broadcast, one behind the other without gaps


class TrainerGroup:
    """A group that a trainer made by itself, and that was joined by `join_trainer`.

    Attributes:
        group: for collectives.
    """

    def __init__(self, group: ProcessGroup, watch: socket.socket) -> None:
        self.group, self._watch = group, watch

    def trainer_lives(self) -> bool:
        """Whether the process that serves the store is there; one that was stopped is."""
        return _is_open(self._watch)

    def stream(self, memory: ReusedMemory) -> GroupReceiver:
        """What takes the updates of a `WeightSender.over` this group."""
        return GroupReceiver(self.group, self.group.device, memory)

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

    def alive() -> None:
        if not _is_open(watch):
            raise RuntimeError("its store has closed the connection")

    try:
        room = default_room(backend) if name is None else f"{name}/{device_room(name, backend)}"
        host = watch.getsockname()[0]
        where = store, room, rank, world_size, backend, device, host, deadline
        # a store whose process was stopped keeps the thread that asks it, whatever its deadline
        group = before(deadline, lambda: join_group(*where, alive), url_of(address), grace=GRACE)
    except BaseException:
        watch.close()
        raise

    return TrainerGroup(group, watch)


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


class TrainerBroadcasts:
    """A transport of tensors that were described already, and checked.

    Gloo looks at no sizes: of a message that is too short the rest of the memory stays as it was,
    and one that is too long ends the process (seen with torch 2.13). So each one gets room for far
    more, and its ends are marked.

    Args:
        joined: the trainer's group.
        infos: the tensors, in the trainer's order.
        packed_bytes: they come as flat runs, of tensors up to the one with which a run is longer
            than this; None: each alone.
        memory: for what arrives, on a CPU.
    """

    def __init__(
        self,
        joined: TrainerGroup,
        infos: Sequence[TensorInfo],
        *,
        packed_bytes: int | None,
        memory: ReusedMemory,
    ) -> None:
        self._joined, self._memory = joined, memory
        self._runs = (
            [[info] for info in infos] if packed_bytes is None else packed(infos, packed_bytes)
        )

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Begin; there is nothing to wait for."""
        slack = max(SLACK, 8 * max(map(prod, shapes.values()))) if self._sees_sizes() else 0
        return Incoming(None, self._buckets(deadline, slack))

    def close(self) -> None:
        """Leave the group: bytes that were sent and not taken would be taken for those that it
        sends next.
        """
        self._joined.close()

    def _sees_sizes(self) -> bool:
        """Whether what this rank has received goes to no other one: gloo would pass the whole room
        on.
        """
        group = self._joined.group
        return group.device.type == "cpu" and (group.rank % 2 == 1 or group.rank + 1 == group.size)

    def _buckets(self, deadline: Deadline, slack: int) -> Iterator[dict[str, Tensor]]:
        """One bucket travels while the one before it is handed on."""
        return overlapped(
            in_groups(self._runs, lambda run: sum(info.nbytes for info in run), BUCKET_BYTES),
            lambda runs: self._begin(runs, deadline, slack),
            lambda begun: self._arrived(begun, deadline),
        )

    def _begin(self, runs: Sequence[Run], deadline: Deadline, slack: int) -> "_Bucket":
        starts, size = _laid_out(runs)
        flat = self._memory.take(size, slack, self._joined.group.device)
        mark = (
            torch.frombuffer(bytearray(secrets.token_bytes(CANARY)), dtype=torch.uint8)
            if slack
            else None
        )
        works: list[Any] = []
        if mark is not None:  # all marks, before the first byte can come
            for start, stop in starts:
                _ends(flat, start, stop, mark)
        for run, (start, stop) in zip(runs, starts, strict=True):
            room = flat[start:] if slack else flat[start:stop]
            works.append(self._joined.group.begin_broadcast(room, deadline, _named(run)))
        return _Bucket(runs, starts, flat, mark, works)

    def _arrived(self, bucket: "_Bucket", deadline: Deadline) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for run, (start, stop), work in zip(bucket.runs, bucket.starts, bucket.works, strict=True):
            self._joined.group.wait([work], _named(run), deadline)
            if bucket.mark is not None:
                _require_size(bucket.flat, start, stop, bucket.mark, _named(run))
            tensors |= _unpacked(run, bucket.flat[start:stop])
        return tensors


class _Bucket(NamedTuple):
    """Runs under way, and where in `flat` each one goes."""

    runs: Sequence[Run]
    starts: list[tuple[int, int]]
    flat: Tensor
    mark: Tensor | None
    works: list[Any]


def packed(infos: Sequence[TensorInfo], max_bytes: int) -> list[list[TensorInfo]]:
    """Tensors in runs; a run ends with the tensor that makes it longer than `max_bytes`, as vLLM
    packs them.
    """
    runs: list[list[TensorInfo]] = [[]]
    size = 0
    for info in infos:
        if size > max_bytes:
            runs.append([])
            size = 0
        runs[-1].append(info)
        size += info.nbytes
    return runs


def _laid_out(runs: Sequence[Run]) -> tuple[list[tuple[int, int]], int]:
    """Where each run begins and ends, with room for a mark behind it, and the size of it all."""
    places: list[tuple[int, int]] = []
    at = 0
    for run in runs:
        stop = at + sum(info.nbytes for info in run)
        places.append((at, stop))
        at = -(-(stop + CANARY) // ALIGNMENT) * ALIGNMENT
    return places, at


def _ends(flat: Tensor, start: int, stop: int, mark: Tensor) -> None:
    inside = min(CANARY, stop - start)
    flat[stop - inside : stop] = mark[:inside]
    flat[stop : stop + CANARY] = mark


def _require_size(flat: Tensor, start: int, stop: int, mark: Tensor, what: str) -> None:
    inside = min(CANARY, stop - start)
    if not torch.equal(flat[stop : stop + CANARY], mark):
        raise WeightUpdateError(
            f"the trainer sent more than the {stop - start} bytes that it told of {what}."
        )
    if inside and torch.equal(flat[stop - inside : stop], mark[:inside]):
        raise WeightUpdateError(
            f"the trainer sent less than the {stop - start} bytes that it told of {what}."
        )


def _unpacked(run: Run, flat: Tensor) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    at = 0
    for info in run:
        tensors[info.name] = tensor_of(info, flat[at : at + info.nbytes])
        at += info.nbytes
    return tensors


def _named(run: Run) -> str:
    return (
        repr(run[0].name)
        if len(run) == 1
        else f"{run[0].name!r} and {len(run) - 1} tensors behind it"
    )
