"""Weights of a row's experts, their gradients with respect to the router's logits, and products of
rows with rows. A program owns one row.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.rows import aligned
from nano_inference.ops.gradients import RouteShape

_BLOCK = 1024


def route_weights(logits: Tensor, ids: Tensor, shape: RouteShape) -> Tensor:
    """Implement `ExpertOps.route_weights` with one program per row. Ids are not checked."""
    weights = torch.empty((len(ids), shape.num_weights), device=logits.device)
    _route(logits, ids, shape, weights, None)
    return weights


def route_gradient(logits: Tensor, ids: Tensor, shape: RouteShape, d_weights: Tensor) -> Tensor:
    """Implement `ExpertOps.route_gradient` with one program per row."""
    d_logits = torch.empty_like(logits)
    _route(logits, ids, shape, d_weights, d_logits)
    return d_logits


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Implement `ExpertOps.row_products`. A program adds 1,024 columns at a time to as many sums,
    and these by a tree.
    """
    if a.shape != b.shape:
        raise ValueError(f"rows {tuple(a.shape)} do not fit rows {tuple(b.shape)}.")
    out = torch.empty(len(a), device=a.device)
    _row_products_kernel[(len(a),)](
        aligned(a), aligned(b), out, a.shape[1], _BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return out


def _route(
    logits: Tensor, ids: Tensor, shape: RouteShape, weights: Tensor, d_logits: Tensor | None
) -> None:
    """Compute the weights, or turn gradients of weights into those of logits."""
    routing, count = shape.routing, shape.num_experts
    columns = count + (shape.shared == "gated")
    if logits.shape != (len(ids), columns) or ids.shape[1] != routing.per_token:
        raise ValueError(
            f"logits {tuple(logits.shape)} and ids {tuple(ids.shape)} do not fit {count} experts, "
            f"{routing.per_token} per row."
        )
    _route_kernel[(len(ids),)](
        aligned(logits),
        aligned(ids),
        aligned(weights),
        d_logits,
        routing.scale,
        routing.floor,
        count,
        columns,
        routing.per_token,
        routing.renormalized,
        routing.scores == "sigmoid",
        ("none", "plain", "gated").index(shape.shared),
        triton.next_power_of_2(count),
        num_warps=1 if count <= 256 else 4,
        enable_fp_fusion=False,
    )


@triton.jit
def _sigmoids(x):
    """Return sigmoid(x) and sigmoid(-x)."""
    small = tl.exp(-tl.abs(x))  # the argument is at most 0: no overflow
    larger, smaller = 1 / (1 + small), small / (1 + small)
    return tl.where(x >= 0, larger, smaller), tl.where(x >= 0, smaller, larger)


@triton.jit
def _route_kernel(
    logits_ptr,  # [N, ROW]
    ids_ptr,
    weights_ptr,  # results, or gradients if there is `d_logits_ptr`
    d_logits_ptr,
    scale,
    floor,
    EXPERTS: tl.constexpr,
    ROW: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    # shared expert: 0 none, 1 with weight 1, 2 with the sigmoid of the last logit
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weigh the experts of one row, or differentiate. Grid (rows).

    With scores g, their divisor D and d = d_weights * scale / D, the gradient of a score is d, less
    sum(d * g) / D if D is the sum of the row's experts. That of a logit follows through the softmax
    or the sigmoid.
    """
    row = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = PER_TOKEN + (SHARED > 0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < EXPERTS
    chosen, d_weights = lanes < 0, tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        is_chosen = lanes == tl.load(ids_ptr + row * PER_TOKEN + choice)
        chosen = chosen | is_chosen
        if d_logits_ptr is not None:
            d_weight = tl.load(weights_ptr + row * width + choice)
            d_weights = tl.where(is_chosen, d_weight, d_weights)
    logits = tl.load(logits_ptr + row * ROW + lanes, mask=inside, other=-float("inf"))
    if SIGMOID:
        sizes, others = _sigmoids(logits)
        whole = 1.0
    else:
        sizes = tl.exp(logits - tl.max(logits, axis=0))
        whole = tl.sum(sizes, axis=0)
    divisor, is_sum = whole, False
    if RENORMALIZED:
        total = tl.sum(tl.where(chosen, sizes, 0.0), axis=0)
        is_sum = total >= floor * whole
        divisor = tl.where(is_sum, total, floor * whole)
    if d_logits_ptr is None:
        at = weights_ptr + row * width
        places = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(at + places, sizes / divisor * scale, mask=chosen)
        if SHARED == 1:
            tl.store(at + PER_TOKEN, 1.0)
        if SHARED == 2:
            gate, _ = _sigmoids(tl.load(logits_ptr + row * ROW + EXPERTS))
            tl.store(at + PER_TOKEN, gate)
    else:
        d_sizes = d_weights * (scale / divisor)  # 0 for others than the row's experts
        total = tl.sum(d_sizes * sizes, axis=0)
        less = tl.where(is_sum, total / divisor, 0.0)
        d_sizes = tl.where(chosen, d_sizes - less, 0.0)
        if SIGMOID:
            d_logits = d_sizes * sizes * others
        else:
            d_whole = tl.where(is_sum, 0.0, total / whole)  # all experts' scores divide
            d_logits = d_sizes * sizes - sizes * d_whole
        at = d_logits_ptr + row * ROW
        tl.store(at + lanes, d_logits, mask=inside)
        if SHARED == 2:
            gate, other = _sigmoids(tl.load(logits_ptr + row * ROW + EXPERTS))
            d_gate = tl.load(weights_ptr + row * width + PER_TOKEN)
            tl.store(at + EXPERTS, d_gate * gate * other)


@triton.jit
def _row_products_kernel(a_ptr, b_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Multiply one row by another. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        a = tl.load(a_ptr + row * width + columns, mask=inside, other=0.0)
        sums += a * tl.load(b_ptr + row * width + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row, tl.sum(sums, axis=0))
