"""Adapters of low rank (arXiv:2106.09685): what they add to a product, as an operation.

Of a row x, y = W x becomes y + B (scale * A x), where A and B are the row's own adapter's. Both
sums are float32, in a fixed order, and begin from x as the product reads it. So a row's bits depend
on its own adapter alone, not on other rows of the step; a row without one keeps its bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

HEAD = "head"  # what an adapter's parts call the head, also where it is the embedding


class LoraPart(NamedTuple):
    """What an adapter adds to columns [first, first + out) of one product's output."""

    first: int
    a: Tensor  # float32 [rank, in], contiguous
    b: Tensor  # float32 [rank, out], contiguous: B transposed
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """One version of an adapter, as the operations read it. Nothing changes it.

    Attributes:
        name: under which requests ask for it.
        version: counts up with each update of the name.
        parts: by the decoder's name of the weight that it adapts; parts rise by their columns.
        packed: what a backend made of `parts` for itself.
    """

    name: str
    version: int
    parts: Mapping[str, tuple[LoraPart, ...]]
    packed: dict[Any, Any] = field(default_factory=dict[Any, Any])

    @property
    def num_bytes(self) -> int:
        """Of its numbers."""
        every = (part for parts in self.parts.values() for part in parts)
        return sum(part.a.nbytes + part.b.nbytes for part in every)


class Place(NamedTuple):
    """Where a matrix [rows, columns] goes.

    Attributes:
        out: float32, contiguous: [rows, columns], or if `turned` [columns, rows].
    """

    out: Tensor
    turned: bool


def placed(places: Sequence[Place]) -> Callable[[Sequence[Tensor]], int]:
    """`Ops.placed` in torch."""

    def write(sources: Sequence[Tensor]) -> int:
        for place, (out, turned) in enumerate(places):
            (out.T if turned else out).copy_(sources[place])
        finite = (bool(out.isfinite().all()) for out, _ in places)
        return next((place for place, own in enumerate(finite) if not own), -1)

    return write


class Adapted(Protocol):
    """The rows of a step, and whose they are."""

    @property
    def adapters(self) -> Sequence[Adapter]:
        """Those of the step."""
        ...

    @property
    def row_adapters(self) -> Tensor:
        """int64 [N]: place among `adapters`, -1 for none."""
        ...


def lora(
    y: Tensor,
    x: Tensor,
    name: str,
    rows: Adapted,
    linear: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """`Ops.lora` in torch: products y [N, out] of x [N, in] and the weight `name`, with what each
    row's adapter adds, in the dtype of y. `linear` keeps a row's bits free of other rows.
    """
    out = y.float().clone()
    for place, adapter in enumerate(rows.adapters):
        own = (rows.row_adapters == place).nonzero()[:, 0]
        if not len(own):
            continue
        for first, a, b, scale in adapter.parts.get(name, ()):
            inner = linear(x[own].float(), a) * scale
            out[own, first : first + b.shape[1]] += linear(inner, b.T)
    return out.to(y.dtype)
