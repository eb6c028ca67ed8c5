"""Weight updates from rank 0 to the others: each gets its slices, bucket by bucket; nobody gathers
the whole.
"""

import itertools
import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nano_inference.engine.weights.update import WeightUpdate
from nano_inference.engine.workers.messages import Call, Piece
from nano_inference.engine.workers.worker_group import WorkerGroup
from nano_inference.errors import RankLost, WeightTransferError, WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.models.shard import shard_of
from nano_inference.models.weights import Slot, named_slots, param_table, read
from nano_inference.parallel.mesh import Place

PIECE_BYTES = 2**23  # of a tensor in one message: steps go between them


class SentUpdates:
    """The other ranks' parts of updates of the policy: what is given is sent on, and written on all
    ranks or on none. What is raised is a `WeightUpdateError`, or `RankLost`.
    """

    def __init__(self, worker_group: WorkerGroup, model: Decoder) -> None:
        spec, mesh = model.part.whole, model.part.place.mesh
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

    @property
    def num_open(self) -> int:
        """Updates that the others have something of."""
        return len(self._numbers)

    def give(self, update: WeightUpdate, name: str, values: Tensor, indices: Tensor | None) -> None:
        """Send all other ranks their parts of a checked tensor, or of single numbers of one."""
        if update.done():  # given up by another thread, as who brings it is about to see
            return
        number = self.number(update)
        try:
            self._give(number, name, values, indices)
        finally:
            if update.done():  # since then: what was sent after `discard` is forgotten too
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
        """All was given. Returns when every rank has its part and can write it."""
        try:
            self._worker_group.call("settle", slow=True, update=self.number(update))
        except RankLost as problem:
            raise WeightTransferError(
                f"the update did not reach every rank: {problem}"
            ) from problem
        except Exception as problem:
            raise WeightUpdateError(f"not every rank can take the update: {problem}") from problem

    def apply(self, update: WeightUpdate) -> None:
        """Let all ranks write it, at this place between steps."""
        self._worker_group.tell(Call("apply", {"update": self._numbers.pop(update)}))

    def discard(self, update: WeightUpdate) -> None:
        """Let all ranks forget it. Raises nothing."""
        number = self._numbers.pop(update, None)
        if number is not None:
            self._forget(number)

    def whole(self, name: str) -> Tensor:
        """A checkpoint tensor as all ranks together hold it."""
        shape = next(table[name].shape for table in self._slots if name in table)
        found = torch.empty(shape, dtype=self._dtypes[name])
        for rank, part in enumerate(self._parts(name)):
            if part is not None:
                self._slots[rank][name].put(found, part)
        return found

    def number(self, update: WeightUpdate) -> int:
        """What the others call an update."""
        with self._lock:
            if update not in self._numbers:
                self._numbers[update] = next(self._count)
            return self._numbers[update]

    def _forget(self, number: int) -> None:
        with suppress(RankLost):  # then there is no engine any more
            self._worker_group.tell(Call("discard", {"update": number}))

    def _parts(self, name: str) -> list[Tensor | None]:
        """What each rank holds of a checkpoint tensor."""
        own = self._slots[0].get(name)
        found: list[Tensor | None] = [None if own is None else read(self._model.params, own).cpu()]
        data: list[list[Tensor]] = [[] for _ in self._worker_group.workers]
        start, most = (
            0,
            max(
                (_num_bytes(table.get(name), self._dtypes[name]) for table in self._slots[1:]),
                default=0,
            ),
        )
        while start < most:
            answers = self._worker_group.call("read", slow=True, name=name, start=start)
            start += PIECE_BYTES
            for mine, answer in zip(data, answers, strict=True):
                if answer:
                    mine.append(torch.frombuffer(bytearray(answer), dtype=torch.uint8))
        for table, mine in zip(self._slots[1:], data, strict=True):
            slot = table.get(name)
            # of an expert it may have nothing
            whole = torch.cat([torch.empty(0, dtype=torch.uint8), *mine])
            found.append(
                None if slot is None else whole.view(self._dtypes[name]).view(slot.local_shape)
            )
        return found

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


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(device="cpu", dtype=dtype).contiguous().view(-1).view(torch.uint8)


def _num_bytes(slot: Slot | None, dtype: torch.dtype) -> int:
    return 0 if slot is None else torch.Size(slot.local_shape).numel() * dtype.itemsize
