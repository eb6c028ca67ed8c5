"""Weight updates from rank 0 to the other ranks.

Each rank receives its slices, bucket by bucket, and no rank gathers the whole. A worker stages its
part until all ranks have theirs. Then all ranks write it, or none.
"""

import itertools
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nano_inference.errors import RankLost, WeightTransferError, WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.slots import Slot, named_slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.models.sharding.shard import shard_of
from nano_inference.parallel.mesh import Place
from nano_inference.ranks.messages import Call, Piece
from nano_inference.ranks.worker_group import WorkerGroup
from nano_inference.weights.update import Change, StagedChanges, WeightUpdate

PIECE_BYTES = 2**23  # bytes of a tensor per message, so that steps can run between messages


class SentUpdates:
    """Other ranks' parts of policy updates, which are written on all ranks or on none.

    Raises `WeightUpdateError` or `RankLost`.
    """

    def __init__(self, worker_group: WorkerGroup, model: Decoder) -> None:
        spec, mesh = model.part.whole, model.part.position.mesh
        self._worker_group, self._model = worker_group, model
        tables = [
            param_table(spec, shard_of(spec, Place(mesh, rank))) for rank in range(mesh.world_size)
        ]
        self._slots: list[dict[str, Slot]] = [named_slots(table) for table in tables]
        self._dtypes = {
            source.name: torch.float32 if param.keep_float32 else model.dtype
            for table in tables
            for param in table
            for source in param.sources
        }
        self._numbers: dict[WeightUpdate, int] = {}
        self._count = itertools.count(1)
        self._lock = threading.Lock()

    def give(self, update: WeightUpdate, name: str, values: Tensor, indices: Tensor | None) -> None:
        """Send all other ranks their parts of a checked tensor, or of single numbers of one."""
        if update.done():  # cancelled by another thread, which the sender will notice
            return
        number = self.number(update)
        try:
            self._give(number, name, values, indices)
        finally:
            if update.done():  # cancelled meanwhile: discard tensors sent after `discard`, too
                self._numbers.pop(update, None)
                self._forget(number)

    def _give(self, number: int, name: str, values: Tensor, indices: Tensor | None) -> None:
        for rank, table in enumerate(self._slots[1:], start=1):
            slot = table.get(name)
            if slot is None:
                continue
            dtype = self._dtypes[slot.tied_to or name]
            if indices is None:
                self._send(
                    rank,
                    number,
                    name,
                    _bytes_of(slot.take(values.detach()), dtype),
                    dtype,
                    slot.local_shape,
                )
            else:
                places, numbers = slot.take_places(indices.to(values.device), values.detach())
                data = torch.cat([_bytes_of(places, torch.int64), _bytes_of(numbers, dtype)])
                self._send(rank, number, name, data, dtype, places.shape, patch=True)

    def settle(self, update: WeightUpdate) -> None:
        """Wait until every rank has its complete part and can write it."""
        try:
            self._worker_group.call("settle", slow=True, update=self.number(update))
        except RankLost as problem:
            raise WeightTransferError(
                f"the update did not reach every rank: {problem}"
            ) from problem
        except Exception as problem:
            raise WeightUpdateError(f"not every rank can take the update: {problem}") from problem

    def apply(self, update: WeightUpdate) -> None:
        """Let all ranks write an update between steps."""
        self._worker_group.tell(Call("apply", {"update": self._numbers.pop(update)}))

    def discard(self, update: WeightUpdate) -> None:
        """Let all ranks discard an update. Never raises."""
        number = self._numbers.pop(update, None)
        if number is not None:
            self._forget(number)

    def whole(self, name: str) -> Tensor:
        """Return a checkpoint tensor assembled from all ranks."""
        shape = next(table[name].shape for table in self._slots if name in table)
        result = torch.empty(shape, dtype=self._dtypes[name])
        for rank, part in enumerate(self._parts(name)):
            if part is not None:
                self._slots[rank][name].put(result, part)
        return result

    def number(self, update: WeightUpdate) -> int:
        """Return the number of an update in messages."""
        with self._lock:
            if update not in self._numbers:
                self._numbers[update] = next(self._count)
            return self._numbers[update]

    def _forget(self, number: int) -> None:
        with suppress(RankLost):  # then the engine has ended
            self._worker_group.tell(Call("discard", {"update": number}))

    def _parts(self, name: str) -> list[Tensor | None]:
        """Return each rank's part of a checkpoint tensor."""
        local = self._slots[0].get(name)
        parts: list[Tensor | None] = [
            None if local is None else read(self._model.params, local).cpu()
        ]
        data = [bytearray() for _ in self._worker_group.workers]
        sizes = (_num_bytes(table.get(name), self._dtypes[name]) for table in self._slots[1:])
        for start in range(0, max(sizes, default=0), PIECE_BYTES):
            answers = self._worker_group.call("read", slow=True, name=name, start=start)
            for mine, answer in zip(data, answers, strict=True):
                mine.extend(answer)
        for table, mine in zip(self._slots[1:], data, strict=True):
            slot, whole = table.get(name), torch.empty(0, dtype=self._dtypes[name])
            if mine:  # empty for an expert of another rank
                whole = torch.frombuffer(mine, dtype=self._dtypes[name])
            parts.append(None if slot is None else whole.view(slot.local_shape))
        return parts

    def _send(
        self,
        rank: int,
        number: int,
        name: str,
        data: Tensor,
        dtype: torch.dtype,
        shape: Any,
        patch: bool = False,
    ) -> None:
        numbers = data.numpy()
        kind = str(dtype).removeprefix("torch.")
        for start in range(0, max(len(numbers), 1), PIECE_BYTES):
            piece = numbers[start : start + PIECE_BYTES].tobytes()
            try:
                self._worker_group.tell_one(
                    rank, Piece(number, name, kind, list(shape), start, piece, patch)
                )
            except RankLost as problem:
                raise WeightTransferError(
                    f"the update did not reach every rank: {problem}"
                ) from problem


@dataclass
class _Staged:
    """Staged part of one update."""

    changes: StagedChanges = field(default_factory=StagedChanges)
    filling: Tensor | None = None  # bytes of an incomplete tensor
    filled: int = 0
    problem: str | None = None


class StagedUpdates:
    """Worker's end: staged updates by number, and settled updates in order."""

    def __init__(self, model: Decoder, slots: Mapping[str, Slot]) -> None:
        self._model, self._slots = model, slots
        self._staged: dict[int, _Staged] = {}
        self._settled: list[int] = []

    def take(self, piece: Piece) -> None:
        """Stage a piece. Errors are reported when the update is settled."""
        staged = self._staged.setdefault(piece.update, _Staged())
        if staged.problem is not None:
            return
        try:
            self._take(staged, piece)
        except (MemoryError, RuntimeError, ValueError, KeyError) as problem:
            staged.problem = (
                f"{piece.name!r} could not be staged: {type(problem).__name__}: {problem}"
            )
            staged.changes, staged.filling = StagedChanges(), None

    def params_of(self, update: int) -> Collection[str]:
        """Return the names of the decoder's parameters that an update changes on this rank."""
        staged = self._staged.get(update)
        return frozenset() if staged is None else staged.changes.params

    def settle(self, update: int) -> None:
        """Finish staging an update. Raise `WeightUpdateError` if it cannot be written."""
        staged = self._staged.setdefault(update, _Staged())
        if staged.problem is not None:
            raise WeightUpdateError(staged.problem)
        if staged.filling is not None:
            raise WeightUpdateError("a tensor arrived incomplete.")
        before = [self._staged[each].changes for each in self._settled]
        staged.changes.require_tied(self._model.params, before)
        self._settled.append(update)

    @torch.no_grad()
    def apply(self, update: int) -> None:
        """Write an update. A failure at this point is a failure of the device."""
        staged = self._staged.pop(update)
        self._settled.remove(update)
        staged.changes.write(self._model.params)

    def discard(self, update: int) -> None:
        """Discard an update."""
        self._staged.pop(update, None)
        if update in self._settled:
            self._settled.remove(update)

    def _take(self, staged: _Staged, piece: Piece) -> None:
        slot = self._slots[piece.name]
        dtype: torch.dtype = getattr(torch, piece.dtype)
        count = torch.Size(piece.shape).numel()
        num_bytes = count * (dtype.itemsize + (8 if piece.patch else 0))
        if piece.offset == 0:
            if staged.filling is not None:
                raise ValueError("received before the previous tensor was complete")
            staged.filling, staged.filled = torch.empty(num_bytes, dtype=torch.uint8), 0
        filling = staged.filling
        if (
            filling is None
            or piece.offset != staged.filled
            or staged.filled + len(piece.data) > len(filling)
        ):
            raise ValueError("the pieces do not fit together")
        if piece.data:
            filling[piece.offset : piece.offset + len(piece.data)] = torch.frombuffer(
                bytearray(piece.data), dtype=torch.uint8
            )
        staged.filled += len(piece.data)
        if staged.filled == len(filling):
            staged.filling = None
            staged.changes.add(self._change(slot, filling, piece, dtype, count))

    def _change(
        self, slot: Slot, data: Tensor, piece: Piece, dtype: torch.dtype, count: int
    ) -> Change:
        if not piece.patch:
            if tuple(piece.shape) != slot.local_shape:
                raise ValueError(f"shape {piece.shape} on this rank, expected {slot.local_shape}")
            return Change(slot, self._there(data.view(dtype).view(piece.shape)))
        places, values = data[: 8 * count].view(torch.int64), data[8 * count :].view(dtype)
        size = torch.Size(slot.local_shape).numel()
        if count and not 0 <= int(places.min()) <= int(places.max()) < size:
            raise ValueError(f"an index is outside of the {size} numbers on this rank")
        return Change(slot, self._there(values), self._there(places))

    def _there(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the device if it has room."""
        try:
            return tensor.to(self._model.device)
        except torch.OutOfMemoryError:
            return tensor


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(device="cpu", dtype=dtype).contiguous().view(-1).view(torch.uint8)


def _num_bytes(slot: Slot | None, dtype: torch.dtype) -> int:
    return 0 if slot is None else torch.Size(slot.local_shape).numel() * dtype.itemsize
