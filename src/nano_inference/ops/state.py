"""Arguments of operations on layers with a state: weights, and a view of the stored columns."""

from typing import Any, NamedTuple, Protocol

from nano_inference.arrays import Tensor


class StateView(Protocol):
    """Stored columns of layers with a state, for reading and writing. Slots are numbered by block,
    independently of the units that back it.

    Attributes:
        block_size: Tokens per block.
        num_blocks, num_units: Number of block ids, and of the units that back them.
        window: Number of tokens that a row reads, itself included.
    """

    block_size: int
    num_blocks: int
    num_units: int
    window: int

    def column(self, layer: int, name: str) -> Tensor:
        """Return the stored column itself: [units, ...]."""
        ...

    def unit_row(self) -> Tensor | None:
        """Return the unit of each block, int64 [blocks], in memory that does not move. None: block
        ids are unit ids.
        """
        ...

    def write(self, layer: int, name: str, slots: Tensor, values: Tensor) -> None:
        """Store values [N, ...] of a per-token column at slots [N]."""
        ...

    def read_state(self, layer: int, blocks: Tensor) -> Tensor:
        """Return the column "state" of blocks [N]: float32 [N, *shape]."""
        ...

    def write_state(self, layer: int, blocks: Tensor, state: Tensor) -> None:
        """Store the column "state" of blocks [N]."""
        ...

    def gather(self, layer: int, name: str, slots: Tensor) -> Tensor:
        """Return values at slots [...], float32 [..., *shape of the column]."""
        ...


class ShortConvWeights(NamedTuple):
    """Weights of one gated short convolution: [channels, 1, taps], and a bias [channels] or
    None.
    """

    conv: Tensor
    bias: Any


class DeltaWeights(NamedTuple):
    """Weights of one layer with the gated delta rule.

    Attributes:
        conv: [channels, 1, taps].
        log_decay, decay_bias: [value heads], float32: the decay of a projection a is
            exp(-exp(log_decay) softplus(a + decay_bias)).
        norm: [value_dim], applied to each head's output.
        eps: Epsilon of this norm.
        key_heads, value_heads, key_dim, value_dim: Numbers of heads and their sizes.
        in_tiles: The output has the first value head of every key head, then the second of every
            key head, and so on. False: the value heads in order.
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
    in_tiles: bool

    @property
    def width(self) -> int:
        """Number of columns of the output."""
        return self.value_heads * self.value_dim
