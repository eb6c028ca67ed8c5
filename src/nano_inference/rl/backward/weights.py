"""Weights and gradients of a backward pass by the kernels."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nano_inference.ops.gradients import GradientOps, Packed

P = TypeVar("P")


class LazyParams(Mapping[str, Tensor]):
    """Parameters of a decoder, each converted when it is read. There is no copy of all of them."""

    def __init__(self, names: Iterable[str], convert: Callable[[str], Tensor]) -> None:
        self._names, self._convert = dict.fromkeys(names), convert

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._convert(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without a conversion

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class AdapterPart(NamedTuple):
    """An adapter's addition to some columns of a product: scale * B (A x)."""

    first: int  # first of the columns
    a: Tensor  # float32 [rank, in]
    b: Tensor  # float32 [columns, rank]
    scale: float
    a_name: str
    b_name: str

    def columns_of(self, rows: Tensor) -> Tensor:
        """Return the part's columns of a product's rows, as a view."""
        return rows[:, self.first : self.first + len(self.b)]


class Weights:
    """Weights of a decoder. Kernels that pack them do so once for all micro-batches of a backward
    pass. Others read them where they are.

    Attributes:
        kernels: Operations.
        exact: Operations in float32, for adapters.
        params: Parameters by the decoder's names; matrices in the dtype of products.
        adapters: Additions to products by the names of their weights.
    """

    def __init__(
        self,
        kernels: GradientOps,
        params: Mapping[str, Tensor],
        adapters: Mapping[str, Sequence[AdapterPart]] | None = None,
    ) -> None:
        self.kernels, self.params, self.adapters = kernels, params, adapters or {}
        self.exact = kernels.exact()
        self._packed: dict[str, Packed] = {}
        self._turned: dict[str, list[Packed]] = {}
        self._stacks: dict[str, Any] = {}
        self._turned_stacks: dict[str, Any] = {}
        self._plain: dict[str, Tensor] = {}

    def forward(self, name: str) -> Packed:
        """Return a matrix [R, C] as the weight of a forward product."""
        return self._kept(self._packed, name, self.kernels.packed)

    def backward(self, name: str) -> list[Packed]:
        """Return a matrix [R, C] as the weight [C, R] of its product's gradient, in parts of
        `most_added` rows.
        """
        return self._kept(self._turned, name, self._turned_parts)

    def forward_experts(self, name: str, count: int) -> Any:
        """Return the `count` matrices [R, C] that a parameter stacks, for forward products."""
        pack = self.kernels.packed_experts
        return self._kept(self._stacks, name, lambda stack: pack(stack, count))

    def backward_experts(self, name: str, count: int) -> Any:
        """Return the `count` matrices [R, C] that a parameter stacks, as weights [C, R]."""
        pack = self.kernels.packed_experts_turned
        return self._kept(self._turned_stacks, name, lambda stack: pack(stack, count))

    def vector(self, name: str) -> Tensor | None:
        """Return a norm's weight, a bias or sinks. None: the model has none."""
        return self.plain(name) if name in self.params else None

    def plain(self, name: str) -> Tensor:
        """Return a parameter as it is."""
        return self._kept(self._plain, name, lambda param: param)

    def _kept(self, kept: dict[str, P], name: str, make: Callable[[Tensor], P]) -> P:
        """Make a form of a parameter, once if it is a copy."""
        if name in kept:
            return kept[name]
        made = make(self.params[name].contiguous())
        if self.kernels.copies_weights:
            kept[name] = made
        return made

    def _turned_parts(self, matrix: Tensor) -> list[Packed]:
        return [self.kernels.packed_turned(part) for part in matrix.split(self.kernels.most_added)]


class Totals:
    """Gradients of the wanted parameters, float32, to which micro-batches add in their order.

    Attributes:
        shapes: Shapes by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self.shapes, self._device = shapes, device
        self._totals: dict[str, Tensor] = {}

    def total(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter. None: it is unwanted."""
        if name not in self.shapes:
            return None
        if name not in self._totals:
            self._totals[name] = torch.zeros(self.shapes[name], device=self._device)
        return self._totals[name]
