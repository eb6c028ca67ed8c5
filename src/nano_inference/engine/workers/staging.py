"""Weight updates on a worker: its part of each, put aside until all ranks have theirs, then written
by all or none.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nano_inference.engine.weights.update import Change, StagedChanges
from nano_inference.engine.workers.messages import Piece
from nano_inference.errors import WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.models.weights import Slot


@dataclass
class _Staged:
    """One update."""

    changes: StagedChanges = field(default_factory=StagedChanges)
    filling: Tensor | None = None  # bytes that are still coming
    filled: int = 0
    problem: str | None = None


class StagedUpdates:
    """What was received and is not written yet, by number of the update; settled ones in order."""

    def __init__(self, model: Decoder, slots: Mapping[str, Slot]) -> None:
        self._model, self._slots = model, slots
        self._staged: dict[int, _Staged] = {}
        self._settled: list[int] = []

    @property
    def num_staged(self) -> int:
        """Updates of which something is put aside."""
        return len(self._staged)

    def take(self, piece: Piece) -> None:
        """Put a piece aside. What goes wrong is told when the update is settled."""
        staged = self._staged.setdefault(piece.update, _Staged())
        if staged.problem is not None:
            return
        try:
            self._take(staged, piece)
        except (MemoryError, RuntimeError, ValueError, KeyError) as problem:
            staged.problem = (
                f"{piece.name!r} could not be put aside: {type(problem).__name__}: {problem}"
            )
            staged.changes, staged.filling = StagedChanges(), None

    def params_of(self, update: int) -> Collection[str]:
        """The decoder's names of the parameters that it changes here."""
        staged = self._staged.get(update)
        return frozenset() if staged is None else staged.changes.params

    def settle(self, update: int) -> None:
        """All of it was sent. Raises `WeightUpdateError` if it cannot be written as it is."""
        staged = self._staged.setdefault(update, _Staged())
        if staged.problem is not None:
            raise WeightUpdateError(staged.problem)
        if staged.filling is not None:
            raise WeightUpdateError("a tensor did not arrive whole.")
        before = [self._staged[each].changes for each in self._settled]
        staged.changes.require_tied(self._model.params, before)
        self._settled.append(update)

    @torch.no_grad()
    def apply(self, update: int) -> None:
        """Write it. What fails now is the device's."""
        staged = self._staged.pop(update)
        self._settled.remove(update)
        staged.changes.write(self._model.params)

    def discard(self, update: int) -> None:
        """Forget it."""
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
                raise ValueError("it came before another one was whole")
            staged.filling, staged.filled = torch.empty(num_bytes, dtype=torch.uint8), 0
        filling = staged.filling
        if (
            filling is None
            or piece.offset != staged.filled
            or staged.filled + len(piece.data) > len(filling)
        ):
            raise ValueError("its pieces do not fit together")
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
                raise ValueError(f"it has shape {piece.shape} here, expected {slot.local_shape}")
            return Change(slot, self._there(data.view(dtype).view(piece.shape)))
        places, values = data[: 8 * count].view(torch.int64), data[8 * count :].view(dtype)
        size = torch.Size(slot.local_shape).numel()
        if count and not 0 <= int(places.min()) <= int(places.max()) < size:
            raise ValueError(f"a place is outside of its {size} numbers")
        return Change(slot, self._there(values), self._there(places))

    def _there(self, tensor: Tensor) -> Tensor:
        """On the device, if it has room."""
        try:
            return tensor.to(self._model.device)
        except torch.OutOfMemoryError:
            return tensor
