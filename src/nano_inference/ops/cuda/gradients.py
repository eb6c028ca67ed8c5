"""The backward pass's operations on a GPU: Triton kernels without atomics.

They implement `GradientOps`. Weights are read where they are: those of the engine if the dtype is
the engine's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.ops.cuda import (
    gradient_attention,
    gradient_experts,
    gradient_routes,
    gradient_rows,
)
from nano_inference.ops.cuda.gradient_attention import TreePaths, tree_paths
from nano_inference.ops.cuda.gradient_head import logit_gradient
from nano_inference.ops.cuda.gradient_products import add_matrices
from nano_inference.ops.cuda.rows import rms_norm
from nano_inference.ops.gradients import (
    Attended,
    AttentionRule,
    Choices,
    HeadShape,
    Packed,
    PathRows,
    Rotary,
    Rotated,
)
from nano_inference.ops.rowwise import Norm


class CudaGradients:
    """`GradientOps` of one device, with products of `dtype`."""

    copies_weights = False
    most_added = 2**31  # the kernel of products cuts sums itself
    most_logits = 2**26  # 256 MB, 510 rows of 131,072 tokens

    norm_gradient = staticmethod(gradient_rows.norm_gradient)
    rotate_gradient = staticmethod(gradient_rows.rotation_gradient)
    gate_gradient = staticmethod(gradient_rows.gate_gradient)
    add_columns = staticmethod(gradient_rows.add_columns)
    add_rows = staticmethod(gradient_rows.add_rows)
    attend = staticmethod(gradient_attention.attend)
    logit_gradient = staticmethod(logit_gradient)
    route_weights = staticmethod(gradient_routes.route_weights)
    route_gradient = staticmethod(gradient_routes.route_gradient)
    row_products = staticmethod(gradient_routes.row_products)
    expert_products = staticmethod(gradient_experts.expert_products)
    add_expert_columns = staticmethod(gradient_experts.add_expert_columns)
    sum_experts = staticmethod(gradient_experts.sum_experts)

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def exact(self) -> "CudaGradients":
        """Return the operations for products of float32."""
        return CudaGradients(torch.float32, self.device)

    def packed(self, matrix: Tensor) -> Packed:
        """Implement `GradientOps.packed` by a view."""
        return Packed(matrix.t(), *matrix.shape)

    def packed_turned(self, matrix: Tensor) -> Packed:
        """Implement `GradientOps.packed_turned` by a view."""
        rows, columns = matrix.shape
        return Packed(matrix, columns, rows)

    def product(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """Implement `GradientOps.product` without a copy of the weight."""
        out = torch.empty((len(x), weight.rows), dtype=torch.float32, device=self.device)
        add_matrices(x, weight.data, out, bias=bias, adds=False)
        return out

    def add_product(
        self, x: Tensor, weight: Packed, out: Tensor, scale: float = 1.0, bias: Tensor | None = None
    ) -> None:
        """Implement `GradientOps.add_product` without a copy of the weight."""
        add_matrices(x, weight.data, out, bias=bias, scale=scale)

    def add_outer(self, d_out: Tensor, x: Tensor, total: Tensor, scale: float = 1.0) -> None:
        """Implement `GradientOps.add_outer` in one product."""
        add_matrices(self.rounded(d_out).t(), x, total, scale=scale)

    def rounded(self, rows: Tensor) -> Tensor:
        """Implement `GradientOps.rounded` by torch."""
        return rows.to(self.dtype)

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype | None = None) -> Tensor:
        """Implement `GradientOps.norm` with the kernel that serves."""
        return rms_norm(None, x, norm._replace(dtype=dtype or self.dtype))[0]

    def rotate(
        self, rows: Tensor, shape: HeadShape, rotary: Rotary, norms: tuple[Norm | None, Norm | None]
    ) -> Rotated:
        """Implement `GradientOps.rotate` in one launch."""
        return gradient_rows.rotated(rows, shape, rotary, norms, self.dtype)

    def paths(self, segments: Sequence[PathRows]) -> TreePaths:
        """Implement `GradientOps.paths` as a tree."""
        return tree_paths(segments, self.device)

    def attend_gradient(
        self,
        parts: Rotated,
        shape: HeadShape,
        paths: TreePaths,
        rule: AttentionRule,
        attended: Attended,
        d_out: Tensor,
        d_sinks: Tensor | None,
    ) -> Rotated:
        """Implement `GradientOps.attend_gradient` in two launches."""
        gradients, rows = gradient_attention.attend_gradient(
            parts, shape, paths, rule, attended, d_out, d_sinks is not None
        )
        if rows is not None and d_sinks is not None:
            gradient_rows.add_columns(rows, d_sinks)
        return gradients

    def gate(self, x: Tensor, activation: str) -> Tensor:
        """Implement `GradientOps.gate` with the kernel that serves."""
        return gradient_rows.gate_rows(x, activation, self.dtype)

    def choices(self, ids: Tensor, count: int) -> Choices:
        """Implement `ExpertOps.choices` with tiles for products of this dtype."""
        return gradient_experts.choices_of(ids, count, self.dtype)

    def packed_experts(self, stack: Tensor, count: int) -> Tensor:
        """Implement `ExpertOps.packed_experts` by a view [count, C, R]."""
        return self.packed_experts_turned(stack, count).transpose(1, 2)

    def packed_experts_turned(self, stack: Tensor, count: int) -> Tensor:
        """Implement `ExpertOps.packed_experts_turned` by a view [count, R, C]."""
        return stack.view(count, -1, stack.shape[1])

    def add_expert_outers(self, d_out: Tensor, x: Tensor, choices: Choices, total: Tensor) -> None:
        """Implement `ExpertOps.add_expert_outers` in one launch."""
        gradient_experts.add_expert_outers(self.rounded(d_out), x, choices, total)
