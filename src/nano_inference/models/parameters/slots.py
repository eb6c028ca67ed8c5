"""`Slot`: where a tensor of the checkpoint goes."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nano_inference.models.parameters.param import ParamSpec, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(Source):
    """Where a source goes: what `take` gives becomes rows [start, start + n) of a parameter.

    `tied_to` is for a tied head: the tensor whose slot this is. The head is compared with it, and
    never written.
    """

    param: str
    start: int
    tied_to: str | None = None

    def take(self, tensor: Any) -> Tensor:
        """This rank's part of a checkpoint tensor, or of what safetensors reads by slices; a view
        where it can be.
        """
        if self.parts is None:
            return tensor[:]
        rows = (slice(None),) * self.axis
        cut = [tensor[(*rows, slice(*part))] for part in self.parts]
        return cut[0] if len(cut) == 1 else torch.cat(cut, dim=self.axis)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """The inverse of `take`: write this rank's part into a checkpoint tensor."""
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
        """Of numbers of a checkpoint tensor, by flat row-major place: this rank's, by place in what
        `take` gives.
        """
        if self.parts is None:
            return indices, values
        inner = torch.Size(self.shape[self.axis + 1 :]).numel()
        size, own_size = self.shape[self.axis], self.local_shape[self.axis]
        along = indices // inner % size
        found: list[tuple[Tensor, Tensor]] = []
        start = 0
        for first, last in self.parts:
            mine = (along >= first) & (along < last)
            places = indices[mine]
            outer, rest = places // (inner * size), places % inner
            found.append(
                ((outer * own_size + along[mine] - first + start) * inner + rest, values[mine])
            )
            start += last - first
        return torch.cat([places for places, _ in found]), torch.cat(
            [numbers for _, numbers in found]
        )


def slots(table: tuple[ParamSpec, ...]) -> dict[str, Slot]:
    """Checkpoint name -> where it goes, of every tensor that has a place of its own."""
    found: dict[str, Slot] = {}
    for param in table:
        start = 0
        for source in param.sources:
            found[source.name] = Slot(
                source.name,
                source.shape,
                source.axis,
                source.parts,
                param=param.name,
                start=start,
            )
            start += source.local_shape[0]
    return found


def named_slots(table: tuple[ParamSpec, ...]) -> dict[str, Slot]:
    """As `slots`, with tied heads: a checkpoint or an update may hold one."""
    found = slots(table)
    for param in table:
        if param.tied is not None:
            name = param.sources[0].name
            found[param.tied] = replace(found[name], name=param.tied, tied_to=name)
    return found
