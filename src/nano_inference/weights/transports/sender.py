"""Trainer's side of weights by `torch.distributed` broadcast."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.weights.sources import BUCKET_BYTES
from nano_inference.weights.staging import WeightPatch
from nano_inference.weights.transports import wire
from nano_inference.weights.transports.addresses import parse_address
from nano_inference.weights.transports.interface import Deadline, overlapped
from nano_inference.weights.transports.rendezvous import (
    check_backend,
    device_for,
    join_group,
    open_room,
    serve_store,
)

UNDER_WAY = 3  # runs in transfer at the same time


class GroupSender:
    """Sender of state dicts over a group in which it is rank 0. Use it as a context manager.

    An error during a transfer ends the group. A description that engines reject does not.

    Args:
        group: Process group. None lets `_join` make one.
        device: Device from which the weights are sent.
        bucket_bytes: Maximum bytes per bucket.
        timeout: Seconds that `connect` and `send` may take.
    """

    can_rejoin = False  # True if engines that ended the group can join a new one

    def __init__(
        self, group: ProcessGroup | None, device: torch.device, bucket_bytes: int, timeout: float
    ) -> None:
        self.device, self.bucket_bytes, self.timeout = device, bucket_bytes, timeout
        self._group = group
        self._rooms: list[Tensor] = []

    def connect(self, *, timeout: float | None = None) -> None:
        """Wait for the engines to join, as `send` also does. Raises `WeightUpdateError`."""
        self._connect(Deadline(self.timeout if timeout is None else timeout))

    def send(
        self,
        weights: Mapping[str, Tensor] | Iterable[WeightPatch],
        *,
        version: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send an update. Return when every engine has received all bytes. Errors in applying them
        are reported by the engines only.

        Raises `WeightUpdateError`, within `timeout` seconds even if engines do not respond.
        """
        deadline = Deadline(self.timeout if timeout is None else timeout)
        buckets = wire.cut(wire.sendable(weights), self.bucket_bytes)
        description = wire.Description(
            version, tuple(tuple(info for info, _ in bucket) for bucket in buckets)
        )
        try:
            accepted = self._describe(description, deadline)
            if accepted:
                self._send(self._connect(deadline), buckets, deadline)
        except BaseException:
            self._drop()
            raise
        if not accepted:
            raise WeightUpdateError(
                "an engine rejected the names, shapes or types of the weights; its error has the "
                "details."
            )

    def close(self) -> None:
        """End the group."""
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe(self, description: wire.Description, deadline: Deadline) -> bool:
        """Return True if every engine accepts the description. Engines that ended the group since
        the last update join a new one.
        """
        kept = self.can_rejoin and self._group is not None
        what = "the description of the weights"
        content = torch.frombuffer(bytearray(wire.encode(description)), dtype=torch.uint8).to(
            self.device
        )
        length = torch.tensor([len(content)], dtype=torch.int64, device=self.device)
        group = self._connect(deadline)
        try:
            group.broadcast(length, deadline, what)
            group.broadcast(content, deadline, what)
            return group.agree(True, deadline, "the engines' answer")
        except WeightUpdateError:
            if not kept or not deadline.left():
                raise
            self._drop()
            return self._describe(description, deadline)

    def _send(
        self, group: ProcessGroup, buckets: list[list[wire.Sendable]], deadline: Deadline
    ) -> None:
        """Send the runs. Several are in transfer while the next one is laid out."""

        def laid_out() -> Iterator[tuple[Tensor, str]]:
            sent = 0
            for number, bucket in enumerate(buckets, start=1):
                what = f"bucket {number} of {len(buckets)}, from {bucket[0][0].name!r} on,"
                for start, stop in wire.runs(wire.num_bytes(info for info, _ in bucket)):
                    yield wire.laid_out(bucket, start, stop, self._room(sent)), what
                    sent += 1

        def begin(run: tuple[Tensor, str]) -> tuple[list[Any], str]:
            return [group.begin_broadcast(run[0], deadline, run[1])], run[1]

        def finish(begun: tuple[list[Any], str]) -> None:
            group.wait(*begun, deadline)

        for _ in overlapped(laid_out(), begin, finish, UNDER_WAY):
            pass
        group.agree(True, deadline, "the engines' confirmation")

    def _room(self, sent: int) -> Tensor:
        """Return memory for a run that no run in transfer uses."""
        if len(self._rooms) < UNDER_WAY:
            self._rooms.append(torch.empty(wire.RUN_BYTES, dtype=torch.uint8, device=self.device))
        return self._rooms[sent % UNDER_WAY]

    def _connect(self, deadline: Deadline) -> ProcessGroup:
        if self._group is None:
            self._group = self._join(deadline)
        return self._group

    def _join(self, deadline: Deadline) -> ProcessGroup:
        """Make the next group. Raises `WeightUpdateError`."""
        raise WeightUpdateError("the sender or its group is closed; make a new sender.")

    def _drop(self) -> None:
        group, self._group = self._group, None
        self._rooms = []  # transfers in progress keep their memory
        if group is not None:
            group.close()


class WeightSender(GroupSender):
    """Sender of state dicts to engines that receive with `broadcast.BroadcastReceiver`. Use it as a
    context manager.

    An error during a transfer ends the group, and the next `send` waits for the engines to join a
    new one. A description that engines reject does not end the group.

    Args:
        address: Address at which engines join, "tcp://host:port". Port 0 picks a free port, found
            in `address` afterwards. The sender listens nowhere else.
        num_receivers: Number of engines. Their ranks are 1 to `num_receivers`.
        backend: "gloo" or "nccl".
        device: Device from which the weights are sent. None is the CPU with gloo and the current
            CUDA device with NCCL.
        bucket_bytes: Maximum bytes per bucket.
        timeout: Seconds that `connect` and `send` may take.
    """

    can_rejoin = True

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        num_receivers: int = 1,
        backend: str = "gloo",
        device: str | torch.device | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 300.0,
    ) -> None:
        check_backend(backend)
        host, port = parse_address(address)
        super().__init__(None, device_for(backend, device), bucket_bytes, timeout)
        self.num_receivers, self.backend = num_receivers, backend
        self._host = host
        self._store: Any = serve_store((host, port), timeout)
        self.address = f"tcp://{host}:{self._store.port}"
        self._groups = 0  # number of groups made

    @staticmethod
    def over(
        process_group: Any,
        *,
        device: str | torch.device = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 300.0,
    ) -> GroupSender:
        """Return a sender over an existing group in which this process is rank 0, such as
        `dist.group.WORLD`.
        """
        source = device_for("gloo", device)
        return GroupSender(ProcessGroup(process_group, source), source, bucket_bytes, timeout)

    def close(self) -> None:
        """End the group and the rendezvous."""
        super().close()
        self._store = None

    def _join(self, deadline: Deadline) -> ProcessGroup:
        if self._store is None:
            return super()._join(deadline)
        room = f"group/{self._groups}/"
        self._groups += 1
        open_room(self._store, self.num_receivers, room, deadline)
        world_size = self.num_receivers + 1
        return join_group(
            self._store, room, 0, world_size, self.backend, self.device, self._host, deadline
        )
