"""Engine's side of prime-rl's broadcasts, whose descriptions are pickles.

Its trainer sends, over a group of vLLM's PyNccl: the number of parts (a model's layers, and one
part for all other tensors), then for each part the length of its description, the description, and
a flat run of numbers for each dtype. A description is a pickled {torch.dtype: [(name, torch.Size,
number of elements)]}. `system/pickles.py` reads it and executes nothing.

Source: `broadcast_state_dict` in prime-rl's `transports/weights/nccl.py`, as of August 2026.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, TypeGuard

import torch
from torch import Tensor

from nano_inference.errors import InvalidRequest, WeightUpdateError
from nano_inference.system.pickles import FIRST_BYTE, Called, Named, read_pickle
from nano_inference.weights.transports import wire
from nano_inference.weights.transports.interface import Deadline, Incoming, Shapes
from nano_inference.weights.transports.reuse import ReusedMemory
from nano_inference.weights.transports.trainer_broadcasts import Broadcasts, unpacked

WHAT = "the trainer's description of its weights"
_SIZE = "torch.Size"
_DTYPES = tuple(f"torch.{name}" for name in wire.DTYPES)
_KNOWN = (_SIZE, *_DTYPES)


class LayerPickles:
    """Transport of one trainer's updates.

    Args:
        group: Ranks of the group. The trainer is rank 0.
        memory: Memory for received tensors.
    """

    def __init__(self, group: Broadcasts, memory: ReusedMemory) -> None:
        self._group, self._memory = group, memory

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Wait for an update to begin. Raises `WeightUpdateError`. An error ends the group."""
        try:
            count = self._number("the number of parts", deadline)
            if not 1 <= count <= len(shapes) + 1:
                raise WeightUpdateError(
                    f"the trainer announced {count} parts for a model of {len(shapes)} tensors; "
                    "send a part for each layer and one for all other tensors, as prime-rl does."
                )
        except BaseException:
            self.close()
            raise
        return Incoming(None, self._buckets(count, shapes, deadline))

    def close(self) -> None:
        """Leave the group. Bytes sent but not received would otherwise be mistaken for the next
        update.
        """
        self._memory.forget()
        self._group.close()

    def _buckets(
        self, count: int, shapes: Shapes, deadline: Deadline
    ) -> Iterator[dict[str, Tensor]]:
        try:
            yield from self._parts(count, shapes, deadline)
        except BaseException:
            self.close()
            raise

    def _parts(self, count: int, shapes: Shapes, deadline: Deadline) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of one dtype and part after the other."""
        seen = set[str]()
        for part in range(1, count + 1):
            of_part = f"of part {part} of {count}"
            size = self._number(f"the length {of_part}", deadline)
            if not 1 <= size <= wire.most_bytes(shapes):
                raise WeightUpdateError(
                    f"{WHAT} {of_part} has {size} bytes; it must have 1 to "
                    f"{wire.most_bytes(shapes)}. Send only the model's tensors."
                )
            content = self._received(size, f"the description {of_part}", deadline)
            for infos in described(bytes(content.cpu().numpy()), shapes, seen):
                flat = self._received(sum(each.nbytes for each in infos), of_part, deadline)
                yield unpacked(infos, flat)
        if not seen:
            raise WeightUpdateError("the trainer sent an empty update; send at least one tensor.")

    def _number(self, what: str, deadline: Deadline) -> int:
        return int(self._received(8, what, deadline).view(torch.int64).item())

    def _received(self, size: int, what: str, deadline: Deadline) -> Tensor:
        """Receive some bytes, uint8 [size]."""
        flat = self._memory.take(size, device=self._group.device)
        self._group.wait([self._group.begin_broadcast(flat, deadline, what)], what, deadline)
        return flat


def described(content: bytes, shapes: Shapes, seen: set[str]) -> list[list[wire.TensorInfo]]:
    """Return the tensors of a description by dtype, in the order in which they arrive.

    `seen` holds the names of earlier parts, and gets these names. Raises `WeightUpdateError`.
    """
    if content[:1] != FIRST_BYTE:
        raise WeightUpdateError(f"{WHAT} is not a pickle; send what prime-rl sends.")
    try:
        by_dtype = read_pickle(content, _KNOWN, WHAT)
    except InvalidRequest as problem:
        raise WeightUpdateError(str(problem)) from problem
    if not isinstance(by_dtype, dict):
        raise _other_form()
    groups: list[list[wire.TensorInfo]] = []
    for dtype, entries in by_dtype.items():
        if not isinstance(dtype, Named) or dtype.name == _SIZE or not isinstance(entries, list):
            raise _other_form()
        triples = [_entry(each) for each in entries]
        name = dtype.name.removeprefix("torch.")
        infos = wire.described([(key, name, shape) for key, shape, _ in triples], shapes, seen)
        for info, (_, _, count) in zip(infos, triples, strict=True):
            if count != (right := prod(info.shape)):
                raise WeightUpdateError(
                    f"{info.name!r} has count {count}, but its shape has {right} elements; send "
                    "numel()."
                )
        if infos:
            groups.append(infos)
    return groups


def _entry(entry: Any) -> tuple[str, list[int], int]:
    """Return the name, shape and number of elements of an entry."""
    if not isinstance(entry, tuple) or len(entry) != 3:
        raise _other_form()
    name, size, count = entry
    if not isinstance(name, str) or type(count) is not int:
        raise _other_form()
    if not isinstance(size, Called) or size.name != _SIZE or len(size.arguments) != 1:
        raise _other_form()
    (shape,) = size.arguments
    if not _is_shape(shape):
        raise _other_form()
    return name, list(shape), count


def _is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(type(each) is int for each in value)


def _other_form() -> WeightUpdateError:
    return WeightUpdateError(
        f"{WHAT} has another form than prime-rl's; send a dict of dtypes, each with a list of "
        "names, shapes and numbers of elements."
    )
