"""Weights by `torch.distributed` broadcast, the engine's side: gloo on a CPU, NCCL on CUDA, by the
same code.

The order of an update: the length of its description, the description, whether every
rank accepts it, then each bucket as one flat run of bytes, and whether every rank has them all.
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
from nano_inference.weights.transports.interface import Deadline, Incoming, Shapes, overlapped
from nano_inference.weights.transports.rendezvous import (
    Address,
    ask_for_room,
    check_backend,
    default_room,
    device_for,
    join_group,
    join_store,
    parse_address,
)
from nano_inference.weights.transports.reuse import ReusedMemory


class GroupReceiver:
    """An engine's end of a group that was joined already, whose rank 0 sends by
    `WeightSender.over`. An error in the middle of an update ends the group.

    Args:
        group: None: `_join` makes one for the first update.
        device: where the weights arrive.
        memory: for what arrives.
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
            # A trainer that speaks another format sends a small number first, such as how many
            # messages will come; then something longer, at which gloo would end this process.
            if not wire.LEAST_BYTES <= size <= most:
                raise WeightUpdateError(
                    f"the trainer announces a description of {size} bytes; from "
                    f"{wire.LEAST_BYTES} to {most} make "
                    "sense. Only what WeightSender sends is understood: descriptions of other "
                    "kinds may be pickles."
                )
            content = self._empty(size, torch.uint8)
            group.broadcast(content, deadline, "the description of the weights")
            told = refusal = None
            try:
                told = wire.decode(bytes(content.cpu().numpy()), shapes)
            except WeightUpdateError as problem:
                refusal = problem
            accepted = group.agree(told is not None, deadline, "the answer to the description")
        except BaseException:
            self._drop(group)
            raise
        if told is None or not accepted:
            raise refusal or WeightUpdateError("another engine refused the trainer's weights.")
        return Incoming(told.version, self._buckets(group, told, deadline))

    def close(self) -> None:
        """End the group, and give memory back; the next `receive` makes a new one."""
        self._memory.forget()
        with self._closing:
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def _drop(self, group: ProcessGroup) -> None:
        """End a group; not the one that a later update has made meanwhile."""
        with self._closing:
            if self._group is group:
                self._group = None
        group.close()

    def _buckets(
        self, group: ProcessGroup, told: wire.Description, deadline: Deadline
    ) -> Iterator[Bucket]:
        """One bucket travels while the one before it is handed on."""
        count = len(told.buckets)

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
            yield from overlapped(enumerate(told.buckets, start=1), begin, finish)
            group.agree(True, deadline, "the confirmation")
        except BaseException:
            # also when the caller stops taking buckets, maybe when the next update has begun
            self._drop(group)
            raise

    def _connect(self, deadline: Deadline) -> ProcessGroup:
        if self._group is None:
            self._group = self._join(deadline)
        return self._group

    def _join(self, deadline: Deadline) -> ProcessGroup:
        """Make the next group. Raises `WeightUpdateError`."""
        raise WeightTransferError("the group that the receiver was given was closed.")

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)


class BroadcastReceiver(GroupReceiver):
    """An engine's end of a group that has the trainer as rank 0; the trainer uses
    `sender.WeightSender`.

    The group is made with the first update and kept for the next ones, as is the memory that it was
    staged in. After an error in the middle of an update it is gone on both sides, and the next
    update makes a new one. A description that is refused leaves it standing.

    Args:
        address: "tcp://host:port" of the trainer.
        rank: of this engine, from 1 on.
        world_size: the trainer and all engines.
        backend: "gloo" or "nccl".
        device: where the weights arrive; None: the CPU with gloo, the current CUDA device with
            NCCL.
        host: address of this machine that the trainer reaches it at; gloo listens there alone.
        default_group: the trainer called `init_process_group` and sends by `WeightSender.over`.
            Such a group cannot be joined a second time.
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
