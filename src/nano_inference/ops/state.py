"""What operations on layers with a state are handed: weights, and the view of what is kept."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class StateView(Protocol):
    """What layers with a state keep, which they read and write. Slots are of blocks, whatever
    stands behind them.

    Attributes:
        block_size: tokens of a block.
        num_blocks, num_units: block ids, and units behind them.
        window: how many tokens back a row reads, itself included.
    """

    block_size: int
    num_blocks: int
    num_units: int
    window: int

    def column(self, layer: int, name: str) -> Tensor:
        """A column itself: [units, ...]."""
        ...

    def unit_row(self) -> Tensor | None:
        """The unit of each block, int64 [blocks], in memory that stays; None: its own number."""
        ...

    def write(self, layer: int, name: str, slots: Tensor, values: Tensor) -> None:
        """Store values [N, ...] of a column of each token at slots [N]."""
        ...

    def read_state(self, layer: int, blocks: Tensor) -> Tensor:
        """The column "state" of blocks [N]: float32 [N, *shape]."""
        ...

    def write_state(self, layer: int, blocks: Tensor, state: Tensor) -> None:
        """Store it."""
        ...

    def gather(self, layer: int, name: str, slots: Tensor) -> Tensor:
        """Values at slots [...], float32 [..., *shape of the column]."""
        ...


class ShortConvWeights(NamedTuple):
    """Of one gated short convolution: [channels, 1, taps], and [channels] or None."""

    conv: Tensor
    bias: Any


class DeltaWeights(NamedTuple):
    """Of one layer of gated delta rule.

    Attributes:
        conv: [channels, 1, taps].
        log_decay, decay_bias: [value heads], float32: a decay is exp(-exp(log_decay) softplus(a +
            decay_bias)) of its projection a.
        norm: [value_dim], of each head's output.
        eps: of this norm.
        key_heads, value_heads, key_dim, value_dim: see `DeltaNet`.
    """

    conv: Tensor
    log_decay: Tensor
    decay_bias: Tensor
    norm: Tensor
    eps: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
