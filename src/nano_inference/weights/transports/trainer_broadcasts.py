"""Broadcasts of a trainer that made the `torch.distributed` group itself. The trainer is rank 0 and
serves the store. Its tensors, described in advance by other means, arrive one by one or packed.

Two kinds of groups are supported. An ordinary group is the first `init_process_group` of the
trainer's process. A named group exists in addition to it, as in SGLang-style trainers, and has its
own rendezvous, whose store uses the group's name as prefix. `_new_process_group_helper(...,
group_name=name)` then adds the name and the device as further prefixes (in torch 2.13 and the
sources of older versions).
"""

import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.parallel.deadline import before
from nano_inference.weights.sources import BUCKET_BYTES, in_groups
from nano_inference.weights.transports.addresses import Address, url_of
from nano_inference.weights.transports.broadcast import check_ranks
from nano_inference.weights.transports.interface import (
    Deadline,
    Incoming,
    Shapes,
    overlapped,
)
from nano_inference.weights.transports.rendezvous import (
    check_backend,
    default_room,
    device_for,
    device_room,
    join_group,
    join_store,
    when_served,
)
from nano_inference.weights.transports.reuse import ReusedMemory
from nano_inference.weights.transports.wire import ALIGNMENT, TensorInfo, tensor_of

GRACE = 0.5  # seconds after the deadline in which the backend may name the missing rank
CANARY = 8  # bytes of a mark
SLACK = 2**30  # bytes of address space, which take no memory until they are written
Run = Sequence[TensorInfo]  # tensors of one broadcast, without gaps


class Broadcasts(Protocol):
    """Ranks that receive a trainer's broadcasts: a `ProcessGroup`, or a group of PyNccl."""

    rank: int
    size: int
    device: torch.device

    def begin_broadcast(self, tensor: Tensor, deadline: Deadline, what: str) -> Any:
        """Start a broadcast without waiting. Pass the result to `wait`."""
        ...

    def wait(self, works: Iterable[Any], what: str, deadline: Deadline) -> None:
        """Wait for broadcasts. Raises `WeightTransferError`."""
        ...

    def close(self) -> None:
        """Leave the group, without a wait."""
        ...


class TrainerGroup:
    """Group made by a trainer and joined with `join_trainer` or `pynccl.join_pynccl`.

    Args:
        group: Ranks of the group.
        watch: Connection to the trainer's store. None if the trainer serves none.
    """

    def __init__(self, group: Broadcasts, watch: socket.socket | None) -> None:
        self.group, self._watch = group, watch

    def trainer_lives(self) -> bool:
        """Return True if the process that serves the store exists, even if it is stopped. Without
        a store, return True until the group is left.
        """
        return self._watch is None or is_open(self._watch)

    def close(self) -> None:
        """Leave the group. Transfers in progress fail on every side."""
        self.group.close()
        if self._watch is not None:
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
    """Join the trainer's group at its store. Raises `WeightUpdateError`, and `WeightTransferError`
    if some rank is missing at the deadline.

    Args:
        address: Host and port of the store.
        rank: Rank of this engine, from 1 on.
        world_size: Number of ranks: the trainer and all engines.
        deadline: Deadline for all ranks to join.
        backend: "gloo" or "nccl".
        device: Device of received tensors. None is the CPU with gloo and the current CUDA device
            with NCCL.
        name: Name of a named group. None for an ordinary group.
    """
    check_ranks(rank, world_size)
    check_backend(backend)
    device = device_for(backend, device)
    store = join_store(address, world_size, deadline)
    watch = watch_trainer(address, deadline)

    def alive() -> None:
        if not is_open(watch):
            raise RuntimeError("the trainer's store has closed the connection")

    try:
        room = default_room(backend) if name is None else f"{name}/{device_room(name, backend)}"
        host = watch.getsockname()[0]
        arguments = store, room, rank, world_size, backend, device, host, deadline
        # a store of a stopped process blocks the calling thread beyond any deadline
        group = before(
            deadline, lambda: join_group(*arguments, alive), url_of(address), grace=GRACE
        )
    except BaseException:
        watch.close()
        raise

    return TrainerGroup(group, watch)


def watch_trainer(address: Address, deadline: Deadline) -> socket.socket:
    """Return a connection to the store that carries no data and closes when the trainer's process
    ends.

    Its local end has the address of this machine that the trainer can reach. Querying the store
    instead would wait for a stopped trainer without limit.
    """

    def connect() -> socket.socket:
        connection = socket.create_connection(address, timeout=deadline.at_most())
        connection.setblocking(False)
        _keep_alive(connection)
        return connection

    return when_served(address, deadline, connect)


def _keep_alive(connection: socket.socket) -> None:
    """Let the system probe the connection, since a machine that is cut off does not close it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def is_open(connection: socket.socket) -> bool:
    """Return True unless the other side has closed a connection that carries no data."""
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:  # reset, or closed here
        return False


class TrainerBroadcasts:
    """Transport of tensors whose descriptions were already received and checked.

    Gloo does not check sizes. A message that is too short leaves the rest of the memory unchanged,
    and one that is too long ends the process (as of torch 2.13). Each receive buffer is therefore
    much larger than needed, and its expected end is marked.

    Args:
        joined: Trainer's group.
        infos: Descriptions of the tensors, in the trainer's order.
        packed_bytes: Size limit of packed runs. A run ends with the tensor that exceeds it. None
            sends each tensor separately.
        memory: Memory for received tensors on a CPU.
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
        """Start to receive, without waiting."""
        slack = max(SLACK, 8 * max(map(prod, shapes.values()))) if self._sees_sizes() else 0
        return Incoming(None, self._buckets(deadline, slack))

    def close(self) -> None:
        """Leave the group. Bytes sent but not received would otherwise be mistaken for the next
        update.
        """
        self._joined.close()

    def _sees_sizes(self) -> bool:
        """Return True if this rank forwards nothing to other ranks. Gloo would forward the whole
        buffer.
        """
        group = self._joined.group
        return group.device.type == "cpu" and (group.rank % 2 == 1 or group.rank + 1 == group.size)

    def _buckets(self, deadline: Deadline, slack: int) -> Iterator[dict[str, Tensor]]:
        """Yield buckets. One is transferred while the previous one is processed."""
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
        if mark is not None:  # write all marks before the first byte can arrive
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
            tensors |= unpacked(run, bucket.flat[start:stop])
        return tensors


class _Bucket(NamedTuple):
    """Runs in progress, and their ranges in `flat`."""

    runs: Sequence[Run]
    starts: list[tuple[int, int]]
    flat: Tensor
    mark: Tensor | None
    works: list[Any]


def packed(infos: Sequence[TensorInfo], max_bytes: int) -> list[list[TensorInfo]]:
    """Split tensors into runs. A run ends with the tensor that makes it longer than `max_bytes`, as
    in vLLM.
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
    """Return the start and end of each run, with room for a mark after it, and the total size."""
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
            f"the trainer sent more than the announced {stop - start} bytes of {what}."
        )
    if inside and torch.equal(flat[stop - inside : stop], mark[:inside]):
        raise WeightUpdateError(
            f"the trainer sent less than the announced {stop - start} bytes of {what}."
        )


def unpacked(run: Run, flat: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a run from its bytes, uint8."""
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
        else f"{run[0].name!r} and the {len(run) - 1} tensors after it"
    )
