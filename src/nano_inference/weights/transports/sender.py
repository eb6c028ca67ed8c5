"""Weights by `torch.distributed` broadcast, the trainer's side."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.weights.sources import BUCKET_BYTES
from nano_inference.weights.staging import WeightPatch
from nano_inference.weights.transports import wire
from nano_inference.weights.transports.interface import Deadline, overlapped
from nano_inference.weights.transports.rendezvous import (
    check_backend,
    device_for,
    join_group,
    open_room,
    parse_address,
    serve_store,
)

UNDER_WAY = 3  # runs that travel at once


class GroupSender:
    """Sends state dicts over a group, whose rank 0 this is. A context manager.

    An error in the middle of an update ends the group. A description that engines refuse leaves it
    standing.

    Args:
        group: None: `_join` makes one.
        device: from where the weights leave.
        bucket_bytes: how much travels at once.
        timeout: seconds that `connect` and `send` may take.
    """

    can_rejoin = False  # engines that ended the group may join another one

    def __init__(
        self, group: ProcessGroup | None, device: torch.device, bucket_bytes: int, timeout: float
    ) -> None:
        self.device, self.bucket_bytes, self.timeout = device, bucket_bytes, timeout
        self._group = group
        self._rooms: list[Tensor] = []

    def connect(self, *, timeout: float | None = None) -> None:
        """Wait for the engines to join; `send` does it too. Raises `WeightUpdateError`."""
        self._connect(Deadline(self.timeout if timeout is None else timeout))

    def send(
        self,
        weights: Mapping[str, Tensor] | Iterable[WeightPatch],
        *,
        version: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send an update; returns when every engine has all its bytes. What they then make of it,
        they say.

        Raises `WeightUpdateError`: within `timeout` seconds whatever the engines do.
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
                "an engine refused the weights by their names, shapes or types; its error says "
                "which."
            )

    def close(self) -> None:
        """End the group."""
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe(self, description: wire.Description, deadline: Deadline) -> bool:
        """Whether every engine accepts what will come. Those that ended the group since the last
        update join again.
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
        """Some runs travel while the next is laid out."""

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
        """Memory for a run, that no run under way has."""
        if len(self._rooms) < UNDER_WAY:
            self._rooms.append(torch.empty(wire.RUN_BYTES, dtype=torch.uint8, device=self.device))
        return self._rooms[sent % UNDER_WAY]

    def _connect(self, deadline: Deadline) -> ProcessGroup:
        if self._group is None:
            self._group = self._join(deadline)
        return self._group

    def _join(self, deadline: Deadline) -> ProcessGroup:
        """Make the next group. Raises `WeightUpdateError`."""
        raise WeightUpdateError(
            "the sender is closed, or the group that it was given is; make a new one."
        )

    def _drop(self) -> None:
        group, self._group = self._group, None
        self._rooms = []  # what still travels keeps its own
        if group is not None:
            group.close()


class WeightSender(GroupSender):
    """Sends state dicts to engines that receive with `broadcast.BroadcastReceiver`. A context
    manager.

    An error in the middle of an update ends the group; the next `send` waits for the engines to
    join a new one. One that engines refuse by its description alone leaves it standing.

    Args:
        address: where the engines join, "tcp://host:port"; port 0: any free one, see `address`
            afterwards. Nothing listens elsewhere.
        num_receivers: engines, of ranks 1 to `num_receivers`.
        backend: "gloo" or "nccl".
        device: from where the weights leave; None: the CPU with gloo, the current CUDA device with
            NCCL.
        bucket_bytes: how much travels at once.
        timeout: seconds that `connect` and `send` may take.
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
        self._groups = 0  # that were made

    @staticmethod
    def over(
        process_group: Any,
        *,
        device: str | torch.device = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 300.0,
    ) -> GroupSender:
        """A sender over a group that there is already and whose rank 0 this is, like
        `dist.group.WORLD`.
        """
        own = device_for("gloo", device)
        return GroupSender(ProcessGroup(process_group, own), own, bucket_bytes, timeout)

    def close(self) -> None:
        """End the group and serve no more."""
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
