"""`GradientOps`: the operations of a backward pass, and their arguments.

Rows are contiguous. `dtype` is that of products' inputs; sums and gradients are float32. All
additions have a fixed order. `ops/cpu/gradients.py` and `ops/cuda/gradients.py` implement them.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from nano_inference.arrays import Device, Dtype, Tensor
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import Routing


class Packed(NamedTuple):
    """A matrix [rows, columns] as products read it."""

    data: Tensor
    rows: int
    columns: int


class HeadShape(NamedTuple):
    """Query heads, KV heads and numbers per head of a layer."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def columns(self) -> int:
        """Columns of the product that makes queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class Rotated(NamedTuple):
    """Queries [N, heads * D], and keys and values [N, kv heads * D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class Rotary(NamedTuple):
    """Rotation of heads: tables float32 [positions, turning / 2], and the positions int64 [N]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    query_scales: Tensor | None
    positions: Tensor


class PathRows(NamedTuple):
    """A segment: the batch rows of its whole path, int64 [L] on the host, rising, of which the last
    `num_rows` are its own and attend. The segments of a batch own all its rows, in order.
    """

    path: Tensor
    num_rows: int


class AttentionRule(NamedTuple):
    """A layer's window (0: none), scale, cap (0: none) of scores, and sinks, float32 [heads]."""

    window: int
    scale: float
    cap: float
    sinks: Tensor | None


class Attended(NamedTuple):
    """Attention of all rows, like the queries, and numbers for its gradient."""

    out: Tensor
    # float32 [N, heads]: logarithms, base 2, of the sums of odds. None: they are computed again
    levels: Tensor | None


class LogitRule(NamedTuple):
    """Conversion of the head's products into levels of a softmax."""

    divisor: float
    cap: float
    temperature: float


class RouteShape(NamedTuple):
    """Routing of a layer of experts, and whether a shared expert has the weight 1 or a gate."""

    num_experts: int
    routing: Routing
    shared: Literal["none", "plain", "gated"]

    @property
    def num_weights(self) -> int:
        """Number of weights of a row: its experts and the shared one."""
        return self.routing.per_token + (self.shared != "none")


class Choices(NamedTuple):
    """Choices of experts, P = N * K: a row and one of its experts, sorted by expert, then by row.

    Attributes:
        order: Index of each choice in the flattened ids of all rows, int64 [P].
        per_row: K, the number of choices of a row.
        groups: Bounds of each expert's choices, as the backend reads them.
    """

    order: Tensor
    per_row: int
    groups: Any

    @property
    def rows(self) -> Tensor:
        """Row of each choice, int64 [P]."""
        return self.order // self.per_row

    def weights_of(self, weights: Tensor) -> Tensor:
        """Return the weight of each choice, [P, 1], from those of rows, [N, K or more]."""
        return weights[self.rows, self.order % self.per_row, None]


class ExpertOps(Protocol):
    """The operations that only layers of experts need.

    A parameter stacks the matrices of `count` experts: [count * R, C].
    """

    def route_weights(self, logits: Tensor, ids: Tensor, shape: RouteShape) -> Tensor:
        """Return the weights of each row's experts, and of the shared one if there is one.

        Args:
            logits: Router's logits, float32 [N, E], and one more for a shared expert's gate.
            ids: Experts of each row, int64 [N, K], rising.
            shape: Routing of the layer.
        """
        ...

    def route_gradient(
        self, logits: Tensor, ids: Tensor, shape: RouteShape, d_weights: Tensor
    ) -> Tensor:
        """Differentiate `route_weights` with respect to the logits: float32 like `logits`."""
        ...

    def row_products(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum of products of each row of `a` and the same row of `b`, [N].

        Both are float32 [N, C].
        """
        ...

    def choices(self, ids: Tensor, count: int) -> Choices:
        """Sort the choices of rows, int64 [N, K], among `count` experts."""
        ...

    def packed_experts(self, stack: Tensor, count: int) -> Any:
        """Return stacked matrices [R, C] of this dtype as weights [R, C]."""
        ...

    def packed_experts_turned(self, stack: Tensor, count: int) -> Any:
        """Return stacked matrices [R, C] of this dtype as weights [C, R]."""
        ...

    def expert_products(
        self, x: Tensor, weights: Any, choices: Choices, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply each choice's row of x, [P, columns] of this dtype, by its expert's weight.

        The result is float32 [P, rows]. `bias` has a number for each row of all weights. Sums of
        more than `GradientOps.most_added` products are not cut on a CPU.
        """
        ...

    def add_expert_outers(self, d_out: Tensor, x: Tensor, choices: Choices, total: Tensor) -> None:
        """Add the `add_outer` of each expert's choices to its part of `total`, float32 like the
        stack.
        """
        ...

    def add_expert_columns(self, rows: Tensor, choices: Choices, total: Tensor) -> None:
        """Add the sum of each expert's float32 rows [P, C] to its part of `total`, [count * C]."""
        ...

    def sum_experts(self, rows: Tensor, choices: Choices, weights: Tensor | None) -> Tensor:
        """Add up the rows [P, C] of each row's choices by rising expert: float32 [N, C].

        Args:
            rows: Float32 rows.
            choices: Choices of N rows.
            weights: Factors, float32 [N, K or more]. None: all are 1.
        """
        ...


class GradientOps(ExpertOps, Protocol):
    """The operations of a backward pass on one device.

    Attributes:
        dtype: Dtype of products' inputs.
        device: Device of all tensors.
        copies_weights: `packed` and `packed_turned` copy a matrix. Otherwise they are views.
        most_added: Most products that one call of `product` adds one after another.
        most_logits: Most logits in memory simultaneously.
    """

    dtype: Dtype
    copies_weights: bool
    most_added: int
    most_logits: int

    @property
    def device(self) -> Device: ...

    def exact(self) -> "GradientOps":
        """Return the operations for products of float32."""
        ...

    def packed(self, matrix: Tensor) -> Packed:
        """Return a matrix [R, C] of this dtype as a weight [R, C]."""
        ...

    def packed_turned(self, matrix: Tensor) -> Packed:
        """Return a matrix [R, C] of this dtype as a weight [C, R]."""
        ...

    def product(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """Multiply rows [N, columns] of this dtype by a weight: float32 [N, rows]."""
        ...

    def add_product(
        self, x: Tensor, weight: Packed, out: Tensor, scale: float = 1.0, bias: Tensor | None = None
    ) -> None:
        """Add `scale` times a product to `out`, float32 [N, rows]."""
        ...

    def add_outer(self, d_out: Tensor, x: Tensor, total: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times d_out.T @ x to a weight's gradient, float32 [R, C].

        `d_out` is float32 [N, R] and is rounded to this dtype, `x` is [N, C] of this dtype.
        """
        ...

    def rounded(self, rows: Tensor) -> Tensor:
        """Round float32 rows to this dtype."""
        ...

    def norm(self, x: Tensor, norm: Norm, dtype: Dtype | None = None) -> Tensor:
        """Normalize float32 rows [N, H], as `Ops.rms_norm`. The result has this dtype, or `dtype`
        float32.
        """
        ...

    def norm_gradient(
        self,
        x: Tensor,
        norm: Norm,
        d_out: Tensor,
        d_x: Tensor,
        d_weight: Tensor | None,
        *,
        adds: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Differentiate norms of runs of len(weight) numbers.

        Args:
            x: Inputs, float32 [N, runs * size], the columns of wider rows if need be.
            norm: The norm, with a weight.
            d_out: Gradient of the outputs, float32 like x.
            d_x: Receives the gradient of x. It may be `d_out` itself.
            d_weight: Gradient of the weight, float32 [size], which is added to. None: unwanted.
            adds: Add to `d_x`.
            scale: Factor of `d_out`.
        """
        ...

    def rotate(
        self, rows: Tensor, shape: HeadShape, rotary: Rotary, norms: tuple[Norm | None, Norm | None]
    ) -> Rotated:
        """Split float32 rows into queries, keys and values of this dtype. Queries and keys are
        normed, if `norms` has their norm, and rotated.
        """
        ...

    def rotate_gradient(self, parts: Rotated, shape: HeadShape, rotary: Rotary) -> Tensor:
        """Return the gradient of rows before rotation and after norms, from those of queries, keys
        and values, all float32.
        """
        ...

    def paths(self, segments: Sequence[PathRows]) -> Any:
        """Return the segments of a batch as `attend` reads them."""
        ...

    def attend(self, parts: Rotated, shape: HeadShape, paths: Any, rule: AttentionRule) -> Attended:
        """Compute the attention of all rows of a batch to the rows of their paths."""
        ...

    def attend_gradient(
        self,
        parts: Rotated,
        shape: HeadShape,
        paths: Any,
        rule: AttentionRule,
        attended: Attended,
        d_out: Tensor,
        d_sinks: Tensor | None,
    ) -> Rotated:
        """Differentiate `attend`: return the gradients of `parts`, float32.

        Args:
            parts, shape, paths, rule: Arguments of `attend`.
            attended: Its result.
            d_out: Gradient of the output, of this dtype.
            d_sinks: Float32 [heads], which is added to. None: unwanted.
        """
        ...

    def gate(self, x: Tensor, activation: str) -> Tensor:
        """Compute `Ops.gate` of float32 [N, 2 * I]: [N, I] of this dtype."""
        ...

    def gate_gradient(self, x: Tensor, activation: str, d_out: Tensor) -> Tensor:
        """Differentiate `gate`: float32 [N, I] -> [N, 2 * I]."""
        ...

    def add_columns(self, rows: Tensor, total: Tensor) -> None:
        """Add the sum of float32 rows [N, C] to `total` [C]."""
        ...

    def add_rows(self, rows: Tensor, ids: Tensor, total: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times each float32 row [N, C] to row ids[i] of `total` [R, C], in order."""
        ...

    def logit_gradient(
        self,
        logits: Tensor,
        targets: tuple[Tensor, Tensor, Tensor],
        masks: tuple[Tensor, Tensor],
        rule: LogitRule,
    ) -> None:
        """Replace products of the head, float32 [R, V], by the gradients with respect to them.

        Args:
            logits: Products.
            targets: First target of each row and the end, int64 [R + 1]; token ids, int64 [P],
                rising in each row; gradients of their logprobs, float32 [P].
            masks: Row of the words of each row's mask, int64 [R], -1 for none, and the words, int32
                [M, W].
            rule: Conversion into levels.
        """
        ...
