"""Adapters of low rank (arXiv:2106.09685), as an operation on a product.

For a row x, y = W x becomes y + B (scale * A x), where A and B belong to the row's adapter. Both
sums are float32, in a fixed order. A row's bits depend only on its own adapter, not on other rows
of the step. A row without an adapter keeps its bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from nano_inference.arrays import Tensor

HEAD = "head"  # name of the head in an adapter's parts, also if the head is the embedding


class LoraPart(NamedTuple):
    """An adapter's addition to columns [first, first + out) of one product's output."""

    first: int
    a: Tensor  # float32 [rank, in], contiguous
    b: Tensor  # float32 [rank, out], contiguous: B transposed
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """One immutable version of an adapter, as the operations read it.

    Attributes:
        name: Name by which requests select the adapter.
        version: Number that rises with each update of the name.
        parts: Parts by the decoder's name of the adapted weight, sorted by column.
        packed: A backend's own representation of `parts`.
    """

    name: str
    version: int
    parts: Mapping[str, tuple[LoraPart, ...]]
    packed: dict[Any, Any] = field(default_factory=dict[Any, Any])

    @property
    def num_bytes(self) -> int:
        """Size of the adapter's matrices in bytes."""
        every = (part for parts in self.parts.values() for part in parts)
        return sum(part.a.nbytes + part.b.nbytes for part in every)


class Place(NamedTuple):
    """Destination of a matrix [rows, columns].

    Attributes:
        out: float32, contiguous: [rows, columns], or [columns, rows] if `turned`.
    """

    out: Tensor
    turned: bool


def placed(places: Sequence[Place]) -> Callable[[Sequence[Tensor]], int]:
    """Implement `Ops.placed` for any kind of arrays."""

    def write(sources: Sequence[Tensor]) -> int:
        for index, (out, turned) in enumerate(places):
            (out.T if turned else out).copy_(sources[index])
        finite = (bool(out.isfinite().all()) for out, _ in places)
        return next((index for index, own in enumerate(finite) if not own), -1)

    return write


class Adapted(Protocol):
    """A step's adapters, and the adapter of each of its rows."""

    @property
    def adapters(self) -> Sequence[Adapter]:
        """Adapters of the step."""
        ...

    @property
    def row_adapters(self) -> Tensor:
        """int64 [N]: index into `adapters`, -1 for none."""
        ...


def lora(
    y: Tensor,
    x: Tensor,
    name: str,
    rows: Adapted,
    linear: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Implement `Ops.lora` with a product `linear`: add each row's adapter to products y [N, out]
    of x [N, in] and the weight `name`. The result has the dtype of y. `linear` must compute each
    row independently of other rows, bit for bit.
    """
    out = y.float().clone()
    for index, adapter in enumerate(rows.adapters):
        members = (rows.row_adapters == index).nonzero()[:, 0]
        if not len(members):
            continue
        for first, a, b, scale in adapter.parts.get(name, ()):
            inner = linear(x[members].float(), a) * scale
            out[members, first : first + b.shape[1]] += linear(inner, b.T)
    return out.to(y.dtype)
