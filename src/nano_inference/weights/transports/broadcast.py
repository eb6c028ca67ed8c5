"""Engine's side of weights by `torch.distributed` broadcast: gloo on a CPU, NCCL on CUDA, with the
same code.

An update is sent in this order: the length of its description, the description, the ranks'
agreement on it, each bucket as one flat run of bytes, and the ranks' confirmation.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_inference.errors import WeightTransferError, WeightUpdateError
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.weights.staging import Bucket
from nano_inference.weights.transports import wire
from nano_inference.weights.transports.addresses import Address, parse_address
from nano_inference.weights.transports.interface import Deadline, Incoming, Shapes, overlapped
from nano_inference.weights.transports.rendezvous import (
    ask_for_room,
    check_backend,
    default_room,
    device_for,
    join_group,
    join_store,
)
from nano_inference.weights.transports.reuse import ReusedMemory


class GroupReceiver:
    """Engine's end of an existing group, whose rank 0 sends with `WeightSender.over`. An error
    during a transfer ends the group.

    Args:
        group: Process group. None lets `_join` make one for the first update.
        device: Device of received weights.
        memory: Memory for received weights.
    """

    def __init__(
        self, group: ProcessGroup | None, device: torch.device, memory: ReusedMemory
    ) -> None:
        self.device = device
        self._group, self._memory = group, memory
        self._closing = threading.Lock()

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Wait for the description of an update. Raises `WeightUpdateError`."""
        group = self._connect(deadline)
        try:
            length = self._empty(1, torch.int64)
            group.broadcast(length, deadline, "the description of the weights")
            size, most = int(length.item()), wire.most_bytes(shapes)
            # A trainer with another format may send a small number first, such as a count of
            # messages, and then a longer message, at which gloo would end this process.
            if not wire.LEAST_BYTES <= size <= most:
                raise WeightUpdateError(
                    f"the trainer announced a description of {size} bytes, outside of "
                    f"{wire.LEAST_BYTES} to {most}; send updates with WeightSender, since other "
                    "formats may contain pickles."
                )
            content = self._empty(size, torch.uint8)
            group.broadcast(content, deadline, "the description of the weights")
            description = refusal = None
            try:
                description = wire.decode(bytes(content.cpu().numpy()), shapes)
            except WeightUpdateError as problem:
                refusal = problem
            is_valid = description is not None
            accepted = group.agree(is_valid, deadline, "the answer to the description")
        except BaseException:
            self._drop(group)
            raise
        if description is None or not accepted:
            raise refusal or WeightUpdateError(
                "another engine rejected the trainer's weights; its error has the reason."
            )
        return Incoming(description.version, self._buckets(group, description, deadline))

    def close(self) -> None:
        """End the group and release memory. The next `receive` makes a new group."""
        self._memory.forget()
        with self._closing:
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def _drop(self, group: ProcessGroup) -> None:
        """End a group, unless a later update has already replaced it."""
        with self._closing:
            if self._group is group:
                self._group = None
        group.close()

    def _buckets(
        self, group: ProcessGroup, description: wire.Description, deadline: Deadline
    ) -> Iterator[Bucket]:
        """Yield buckets. One is transferred while the previous one is processed."""
        count = len(description.buckets)

        def begin(
            numbered: tuple[int, Sequence[wire.TensorInfo]],
        ) -> tuple[Sequence[wire.TensorInfo], Tensor, list[Any], str]:
            number, bucket = numbered
            what = f"bucket {number} of {count}, from {bucket[0].name!r} on,"
            flat = self._memory.take(wire.num_bytes(bucket), device=self.device)
            works = [
                group.begin_broadcast(flat[start:stop], deadline, what)
                for start, stop in wire.runs(len(flat))
            ]
            return bucket, flat, works, what

        def finish(begun: tuple[Sequence[wire.TensorInfo], Tensor, list[Any], str]) -> Bucket:
            bucket, flat, works, what = begun
            group.wait(works, what, deadline)
            return wire.unpack(bucket, flat)

        try:
            yield from overlapped(enumerate(description.buckets, start=1), begin, finish)
            group.agree(True, deadline, "the confirmation")
        except BaseException:
            # also if the caller stops iterating, possibly after the next update has begun
            self._drop(group)
            raise

    def _connect(self, deadline: Deadline) -> ProcessGroup:
        if self._group is None:
            self._group = self._join(deadline)
        return self._group

    def _join(self, deadline: Deadline) -> ProcessGroup:
        """Make the next group. Raises `WeightUpdateError`."""
        raise WeightTransferError("the receiver's group was closed; make a new receiver.")

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)


class BroadcastReceiver(GroupReceiver):
    """Engine's end of a group in which the trainer is rank 0 and uses `sender.WeightSender`.

    The group is made for the first update and kept for later ones, as is the staging memory. An
    error during a transfer ends the group on both sides, and the next update makes a new one. A
    rejected description does not end the group.

    Args:
        address: Address of the trainer, "tcp://host:port".
        rank: Rank of this engine, from 1 on.
        world_size: Number of ranks: the trainer and all engines.
        backend: "gloo" or "nccl".
        device: Device of received weights. None is the CPU with gloo and the current CUDA device
            with NCCL.
        host: Address of this machine that the trainer can reach. Gloo listens only there.
        default_group: True if the trainer called `init_process_group` and sends with
            `WeightSender.over`. Such a group cannot be joined a second time.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int = 1,
        world_size: int = 2,
        backend: str = "gloo",
        device: str | torch.device | None = None,
        host: str = "127.0.0.1",
        default_group: bool = False,
    ) -> None:
        check_ranks(rank, world_size)
        check_backend(backend)
        super().__init__(None, device_for(backend, device), ReusedMemory())
        self.address: Address = parse_address(address)
        self.default_group = default_group
        self.rank, self.world_size, self.backend, self.host = rank, world_size, backend, host

    def _join(self, deadline: Deadline) -> ProcessGroup:
        store = join_store(self.address, self.world_size, deadline)
        room = (
            default_room(self.backend)
            if self.default_group
            else ask_for_room(store, self.rank, deadline)
        )
        return join_group(
            store,
            room,
            self.rank,
            self.world_size,
            self.backend,
            self.device,
            self.host,
            deadline,
            alive=lambda: store.check(["alive"]),
        )


def check_ranks(rank: int, world_size: int) -> None:
    """Raise `WeightUpdateError` unless an engine can have this rank."""
    if not 1 <= rank < world_size:
        raise WeightUpdateError(
            f"rank={rank} must be from 1 to world_size - 1 = {world_size - 1}; 0 is the trainer."
        )
