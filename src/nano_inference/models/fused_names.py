"""Tensors that a trainer holds in one piece and a checkpoint in several: transformers keeps all
experts of a layer together in memory, and saves each by itself.

One table says which names weight updates may use; every transport and every session goes by it.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.models.weights import TIED

Shapes = Mapping[str, tuple[int, ...]]

_FIRST_EXPERT = re.compile(r"(.*)\.(mlp|block_sparse_moe)\.experts\.0\.(?:down_proj|w2)\.weight")
# What a checkpoint calls gate, up and down of an expert, by the module that they stand in.
_PROJECTIONS = {
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe": ("w1", "w3", "w2"),
}


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor whose rows are those of several checkpoint tensors of one shape, one after the
    other.

    Attributes:
        shape: of the whole.
        parts: names in the checkpoint, in order.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]

    def split(self, whole: Tensor) -> list[tuple[str, Tensor]]:
        """Each part with its name; `whole` has `shape`. Views where it is contiguous."""
        size = whole.numel() // len(self.parts) // self.shape[-1]
        return list(
            zip(self.parts, whole.reshape(len(self.parts), size, self.shape[-1]), strict=True)
        )

    def split_places(self, places: Tensor, values: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Single numbers of the whole by the part that each is of: name, flat places in the part,
        values.

        `places` are flat and row-major, int64 [n], inside of the whole.
        """
        size = torch.Size(self.shape).numel() // len(self.parts)
        part = places // size
        order = part.argsort(stable=True)
        counts = part.bincount(minlength=len(self.parts)).tolist()
        rows = zip(
            self.parts,
            (places % size)[order].split(counts),
            values[order].split(counts),
            strict=True,
        )
        return [(name, inside, numbers) for name, inside, numbers in rows if len(inside)]


def fused_tensors(shapes: Shapes) -> dict[str, FusedTensor]:
    """What transformers has in memory under other names than a checkpoint of these tensors, or in
    one piece.
    """
    found: dict[str, FusedTensor] = {}
    for name in shapes:
        if (first := _FIRST_EXPERT.fullmatch(name)) is None:
            continue
        layer, module = first.groups()
        own, theirs = f"{layer}.{module}", f"{layer}.mlp"
        gate, up, down = _PROJECTIONS[module]
        count = next(
            i for i in itertools.count() if f"{own}.experts.{i}.{down}.weight" not in shapes
        )
        experts = [f"{own}.experts.{i}" for i in range(count)]
        inner, hidden = shapes[f"{experts[0]}.{gate}.weight"]
        gates = tuple(
            f"{expert}.{projection}.weight" for expert in experts for projection in (gate, up)
        )
        downs = tuple(f"{expert}.{down}.weight" for expert in experts)
        found[f"{theirs}.experts.gate_up_proj"] = FusedTensor((count, 2 * inner, hidden), gates)
        found[f"{theirs}.experts.down_proj"] = FusedTensor((count, hidden, inner), downs)
        if own != theirs:
            router = f"{own}.gate.weight"
            found[f"{theirs}.gate.weight"] = FusedTensor(shapes[router], (router,))
    return found


def accepted_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Every name that a weight update may use, with its shape: the checkpoint's own, a tied head's,
    and fused ones.
    """
    tied = {name: shapes[own] for name, own in TIED.items() if own in shapes}
    fused = {name: each.shape for name, each in fused_tensors(shapes).items()}
    return tied | fused | dict(shapes)


def unfused(
    fused: Mapping[str, FusedTensor], name: str, tensor: Tensor
) -> list[tuple[str, Tensor]]:
    """A tensor by the names of its checkpoint. One of a name or shape that `fused` has not comes
    back as it is.
    """
    # callers err
    known = fused.get(name) if isinstance(name, str) and isinstance(tensor, Tensor) else None
    if known is None or tuple(tensor.shape) != known.shape:
        return [(name, tensor)]
    return known.split(tensor)
