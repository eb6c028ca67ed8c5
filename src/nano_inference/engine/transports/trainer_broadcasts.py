"""Tensors that a trainer broadcasts by itself, in an order that it told by other means: one each,
or packed.
"""

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from nano_inference.engine.transports.interface import Deadline, Incoming, Shapes
from nano_inference.engine.transports.reuse import ReusedMemory
from nano_inference.engine.transports.trainer_group import TrainerGroup
from nano_inference.engine.transports.wire import ALIGNMENT, Piece
from nano_inference.engine.weight_update import BUCKET_BYTES, in_groups
from nano_inference.errors import WeightUpdateError

CANARY = 8  # bytes
SLACK = 2**30  # bytes; of addresses, not of memory, until somebody writes there
Run = Sequence[Piece]  # what travels by one broadcast, one behind the other without gaps


class TrainerBroadcasts:
    """A transport of tensors that were described already, and checked.

    Gloo looks at no sizes: of a message that is too short the rest of the memory stays as it was,
    and one that is too long ends the process (seen with torch 2.13). So each one gets room for far
    more, and its ends are marked.

    Args:
        joined: the trainer's group.
        pieces: the tensors, in the trainer's order.
        packed_bytes: they come as flat runs, of tensors up to the one with which a run is longer
            than this; None: each alone.
        memory: for what arrives, on a CPU.
    """

    def __init__(
        self,
        joined: TrainerGroup,
        pieces: Sequence[Piece],
        *,
        packed_bytes: int | None,
        memory: ReusedMemory,
    ) -> None:
        self._joined, self._memory = joined, memory
        self._runs = (
            [[piece] for piece in pieces] if packed_bytes is None else packed(pieces, packed_bytes)
        )

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Begin; there is nothing to wait for."""
        slack = max(SLACK, 8 * max(map(prod, shapes.values()))) if self._sees_sizes() else 0
        return Incoming(None, self._buckets(deadline, slack))

    def close(self) -> None:
        """Leave the group: what the trainer has sent and nobody took would be taken for what it
        sends next.
        """
        self._joined.close()

    def _sees_sizes(self) -> bool:
        """Whether what this rank has received goes to no other one: gloo would pass the whole room
        on.
        """
        rank, world_size, group = self._joined.rank, self._joined.world_size, self._joined.group
        return group.device.type == "cpu" and (rank % 2 == 1 or rank + 1 == world_size)

    def _buckets(self, deadline: Deadline, slack: int) -> Iterator[dict[str, Tensor]]:
        """One bucket travels while the one before it is handed on."""
        under_way: deque[_Bucket] = deque()
        for runs in in_groups(self._runs, lambda run: sum(map(_size, run)), BUCKET_BYTES):
            under_way.append(self._begin(runs, deadline, slack))
            if len(under_way) == 2:
                yield self._arrived(under_way.popleft(), deadline)
        while under_way:
            yield self._arrived(under_way.popleft(), deadline)

    def _begin(self, runs: Sequence[Run], deadline: Deadline, slack: int) -> "_Bucket":
        starts, size = _laid_out(runs)
        if self._joined.group.device.type == "cpu":
            flat = self._memory.take(size, slack)
        else:
            flat = torch.empty(size, dtype=torch.uint8, device=self._joined.group.device)
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


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Runs under way, and where in `flat` each one goes."""

    runs: Sequence[Run]
    starts: list[tuple[int, int]]
    flat: Tensor
    mark: Tensor | None
    works: list[Any]


def packed(pieces: Sequence[Piece], max_bytes: int) -> list[list[Piece]]:
    """Pieces in runs; a run ends with the piece that makes it longer than `max_bytes`, as vLLM
    packs them.
    """
    runs: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if size > max_bytes:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += _size(piece)
    return runs


def _laid_out(runs: Sequence[Run]) -> tuple[list[tuple[int, int]], int]:
    """Where each run begins and ends, with room for a mark behind it, and the size of it all."""
    places: list[tuple[int, int]] = []
    at = 0
    for run in runs:
        stop = at + sum(map(_size, run))
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
    for piece in run:
        part = flat[at : at + _size(piece)]
        if part.storage_offset() % piece.dtype.itemsize:  # behind one of a smaller type
            part = part.clone()
        tensors[piece.name] = part.view(piece.dtype).view(piece.shape)
        at += _size(piece)
    return tensors


def _named(run: Run) -> str:
    return (
        repr(run[0].name)
        if len(run) == 1
        else f"{run[0].name!r} and {len(run) - 1} tensors behind it"
    )


def _size(piece: Piece) -> int:
    return piece.dtype.itemsize * prod(piece.shape)
