"""What operations on layers with a state are handed: weights, and the view of what is kept."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class StateView(Protocol):
    """What layers with a state keep, which they read and write. Slots are of blocks, whatever
    stands behind them.
    """

    block_size: int

    def write(self, layer: int, name: str, slots: Tensor, values: Tensor) -> None:
        """Store values [N, ...] of a column of each token at slots [N]."""
        ...

    def gather(self, layer: int, name: str, slots: Tensor) -> Tensor:
        """Values at slots [...], float32 [..., *shape of the column]."""
        ...


class ShortConvWeights(NamedTuple):
    """Of one gated short convolution: [channels, 1, taps], and [channels] or None."""

    conv: Tensor
    bias: Any
