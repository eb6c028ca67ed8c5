"""`Slot`: the destination of a checkpoint tensor."""

import math
from dataclasses import dataclass, replace
from typing import Any

from nano_inference.arrays import Tensor, namespace
from nano_inference.models.parameters.param import ParamSpec, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(Source):
    """Destination of a source: `take` returns rows [start, start + n) of a parameter.

    A tied head has `tied_to`, the name of the tensor with the same slot. The head is compared with
    that tensor and never written.
    """

    param: str
    start: int
    tied_to: str | None = None

    def take(self, tensor: Any) -> Tensor:
        """Return this rank's part of a tensor or of a safetensors slice, as a view if possible."""
        if self.parts is None:
            return tensor[:]
        rows = (slice(None),) * self.axis
        cut = [tensor[(*rows, slice(*part))] for part in self.parts]
        return cut[0] if len(cut) == 1 else namespace(cut[0]).cat(cut, dim=self.axis)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write this rank's part into a checkpoint tensor: the inverse of `take`."""
        if self.parts is None:
            whole.copy_(part)
            return
        start = 0
        for first, last in self.parts:
            whole.narrow(self.axis, first, last - first).copy_(
                part.narrow(self.axis, start, last - first)
            )
            start += last - first

    def take_places(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Select this rank's entries from single entries of a checkpoint tensor.

        `indices` are flat row-major indices in that tensor. The returned indices refer to the
        result of `take`.
        """
        if self.parts is None:
            return indices, values
        inner = math.prod(self.shape[self.axis + 1 :])
        size, own_size = self.shape[self.axis], self.local_shape[self.axis]
        along = indices // inner % size
        taken: list[tuple[Tensor, Tensor]] = []
        start = 0
        for first, last in self.parts:
            mine = (along >= first) & (along < last)
            places = indices[mine]
            outer, rest = places // (inner * size), places % inner
            taken.append(
                ((outer * own_size + along[mine] - first + start) * inner + rest, values[mine])
            )
            start += last - first
        cat = namespace(indices).cat
        return cat([places for places, _ in taken]), cat([numbers for _, numbers in taken])


def slots(table: tuple[ParamSpec, ...]) -> dict[str, Slot]:
    """Return the slot of every checkpoint tensor that is stored."""
    by_name: dict[str, Slot] = {}
    for param in table:
        start = 0
        for source in param.sources:
            by_name[source.name] = Slot(
                source.name,
                source.shape,
                source.axis,
                source.parts,
                param=param.name,
                start=start,
            )
            start += source.local_shape[0]
    return by_name


def named_slots(table: tuple[ParamSpec, ...]) -> dict[str, Slot]:
    """Return `slots` and those of tied heads, which a checkpoint or an update may include."""
    by_name = slots(table)
    for param in table:
        if param.tied is not None:
            name = param.sources[0].name
            by_name[param.tied] = replace(by_name[name], name=param.tied, tied_to=name)
    return by_name
