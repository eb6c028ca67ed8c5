"""Layers of experts on a GPU: routing, products grouped by expert, and the sum over a row's
experts.

Rows are sorted by expert and cut into tiles of `ROWS`; the last tile of each expert may be partial.
A program computes a tile by some columns, adding up in the order of k with the same instruction for
any contents of the tile. A row's bits therefore do not depend on the other rows of its expert. The
host reads nothing: the number of tiles follows from the number of rows, and unneeded tiles do
nothing.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportUnreachable=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.expert_tiles import (
    expert_tiles,
    sorted_by_expert,
    store_tile,
    tile_of_expert,
)
from nano_inference.ops.cuda.matmul import invariant_product
from nano_inference.ops.cuda.quantised_experts import quantised_experts
from nano_inference.ops.cuda.rows import ACTIVATIONS, aligned
from nano_inference.ops.moe import Exchange, Experts, MoeSteps, Note, mixture
from nano_inference.ops.reference.quantised import QuantisedWeight

ROWS = 16  # rows per tile: few, since in a decode step an expert gets about one
COLUMNS = 64
ROW_BLOCK = 4096  # rows whose products with all of their experts are in memory together
SUM_BLOCK = 1024


def moe(
    x: Tensor,
    experts: Experts,
    exchange: Exchange | None = None,
    note: Note | None = None,
    routed: Tensor | None = None,
) -> Tensor:
    """Implement `Ops.moe` with the kernels below."""
    return mixture(STEPS, x, experts, exchange, ROW_BLOCK, note, routed)


def route(x: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Implement `MoeSteps.route` with one program per row."""
    routing, shared = experts.routing, experts.shared
    bias = None if experts.biases is None else experts.biases.router
    if routing.logit_scale == 1:
        logits = invariant_product(x, experts.router, bias, torch.float32)
    else:
        logits = invariant_product(x, experts.router, None, torch.float32) * routing.logit_scale
        logits = logits if bias is None else logits + bias
    ids = torch.empty((len(x), routing.per_token), dtype=torch.int64, device=x.device)
    weights = torch.empty((len(x), experts.num_weights), device=x.device)
    if len(x):
        count = experts.num_experts
        _route_kernel[(len(x),)](
            logits,
            experts.bias,
            ids,
            weights,
            routing.scale,
            routing.floor,
            count,
            logits.shape[1],
            routing.per_token,
            routing.renormalized,
            routing.scores == "sigmoid",
            routing.groups,
            routing.groups_kept,
            routing.group_best,
            0 if shared is None else 1 + shared.gated,
            triton.next_power_of_2(count),
            num_warps=1 if count <= 256 else 4,
            enable_fp_fusion=False,
        )
    return ids, weights


def products(x: Tensor, rows: Tensor, held: Tensor, experts: Experts) -> Tensor:
    """Implement `MoeSteps.products` in float32."""
    hidden, inner = x.shape[1], experts.down.shape[1]
    if not len(rows):
        return torch.empty((0, hidden), dtype=torch.float32, device=x.device)
    tiles = expert_tiles(*sorted_by_expert(held, experts.num_held), ROWS)
    if isinstance(experts.down, QuantisedWeight):
        return quantised_experts(x, rows, tiles, experts)
    x = aligned(x.to(experts.gate_up.dtype))
    out = torch.empty((len(rows), hidden), dtype=torch.float32, device=x.device)
    between = torch.empty((len(rows), inner), dtype=x.dtype, device=x.device)
    depth = 32 if x.dtype == torch.float32 else 64
    _, gate_up_bias, down_bias = experts.biases or (None, None, None)
    for source, weight, bias, result, columns, activation in (
        (x, experts.gate_up, gate_up_bias, between, inner, ACTIVATIONS[experts.activation]),
        (between, experts.down, down_bias, out, hidden, None),
    ):
        _products_kernel[(len(tiles.experts), triton.cdiv(columns, COLUMNS))](
            source,
            weight,
            bias,
            result,
            rows,
            *tiles,
            experts.num_held,
            columns,
            source.shape[1],
            activation is not None,
            activation or 0,
            ROWS,
            COLUMNS,
            depth,
            "ieee" if x.dtype == torch.float32 else "tf32",  # only used for float32
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=False,
        )
    return out


def combine(products: Tensor, weights: Tensor) -> Tensor:
    """Implement `MoeSteps.combine` in float32."""
    num_rows, per_token, hidden = products.shape
    out = torch.empty((num_rows, hidden), dtype=torch.float32, device=products.device)
    if num_rows:
        _combine_kernel[(num_rows, triton.cdiv(hidden, SUM_BLOCK))](
            aligned(products),
            aligned(weights),
            out,
            hidden,
            per_token,
            SUM_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


STEPS = MoeSteps(route, products, combine)


def record_experts(record: Tensor, slots: Tensor, ids: Tensor) -> None:
    """Implement `Ops.record_experts` in one launch. Padding rows are not written."""
    count = ids.numel()
    if count:
        _record_kernel[(triton.cdiv(count, SUM_BLOCK),)](
            record, slots.contiguous(), ids, count, ids.shape[1], SUM_BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def _highest(keys, taken, lanes, BLOCK: tl.constexpr):
    """Return the lane of the highest key that is not taken, the lowest lane of several equal ones.
    If the maximum is NaN, no key equals it, and the lowest remaining lane is returned.
    """
    left = tl.where(taken, -float("inf"), keys)
    order = tl.where(left == tl.max(left, axis=0), lanes, lanes + BLOCK)
    return tl.min(tl.where(taken, 2 * BLOCK, order), axis=0) % BLOCK


@triton.jit
def _of_best_groups(
    keys,
    lanes,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the keys, with -inf for experts outside the best groups."""
    worth = tl.full((BLOCK,), -float("inf"), tl.float32)  # one lane per group
    groups = lanes // (EXPERTS // GROUPS)
    for group in tl.static_range(GROUPS):
        outside = (groups != group) | (lanes >= EXPERTS)
        best = 0.0
        for _ in tl.static_range(GROUP_BEST):
            lane = _highest(keys, outside, lanes, BLOCK)
            best += tl.sum(tl.where(lanes == lane, keys, 0.0), axis=0)
            outside = outside | (lanes == lane)
        worth = tl.where(lanes == group, best, worth)
    kept = lanes >= GROUPS
    may = tl.zeros((BLOCK,), tl.int32)
    for _ in tl.static_range(GROUPS_KEPT):
        group = _highest(worth, kept, lanes, BLOCK)
        kept = kept | (lanes == group)
        may = tl.where(groups == group, 1, may)
    return tl.where(may == 1, keys, -float("inf"))


@triton.jit
def _route_kernel(
    logits_ptr,  # [N, ROW]
    bias_ptr,  # [EXPERTS] or None
    ids_ptr,
    weights_ptr,
    scale,
    floor,
    EXPERTS: tl.constexpr,
    ROW: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    # shared expert: 0 none, 1 with weight 1, 2 with the sigmoid of the last logit
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select and weigh the experts of one row. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < EXPERTS
    logits = tl.load(logits_ptr + row * ROW + lanes, mask=inside, other=-float("inf"))
    if SIGMOID:
        sizes = tl.where(inside, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
        whole = 1.0
    else:
        sizes = tl.where(inside, tl.exp(logits - tl.max(logits, axis=0)), 0.0)
        whole = tl.sum(sizes, axis=0)
    keys = logits
    if bias_ptr is not None:
        keys = sizes / whole + tl.load(bias_ptr + lanes, mask=inside, other=0.0)
    if GROUPS > 1:
        keys = _of_best_groups(keys, lanes, EXPERTS, GROUPS, GROUPS_KEPT, GROUP_BEST, BLOCK)
    taken = lanes >= EXPERTS
    for _ in tl.static_range(PER_TOKEN):
        taken = taken | (lanes == _highest(keys, taken, lanes, BLOCK))
    chosen = taken & inside
    total = tl.sum(tl.where(chosen, sizes, 0.0), axis=0) if RENORMALIZED else whole
    least = floor * whole
    total = tl.where(total < least, least, total)
    width: tl.constexpr = PER_TOKEN + (SHARED > 0)
    places = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(ids_ptr + row * PER_TOKEN + places, lanes.to(tl.int64), mask=chosen)
    tl.store(weights_ptr + row * width + places, sizes / total * scale, mask=chosen)
    if SHARED == 1:
        tl.store(weights_ptr + row * width + PER_TOKEN, 1.0)
    if SHARED == 2:
        gate = tl.load(logits_ptr + row * ROW + EXPERTS)
        tl.store(weights_ptr + row * width + PER_TOKEN, 1.0 / (1.0 + tl.exp(-gate)))


@triton.jit
def _products_kernel(
    x_ptr,  # [M, K], or sorted [P, K] if not GATE
    # [experts * rows, K]: COLUMNS_IN_ALL rows per expert, followed by as many up rows if GATE
    weight_ptr,
    bias_ptr,  # one number per row of the weight, or None
    out_ptr,  # [P, columns], sorted by expert if GATE
    rows_ptr,  # row of x for each product
    order_ptr,
    experts_ptr,
    firsts_ptr,
    ends_ptr,
    num_experts,
    COLUMNS_IN_ALL: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of rows by one tile of columns. Grid (tiles, tiles of columns)."""
    expert = tl.load(experts_ptr + tl.program_id(0))
    if expert >= num_experts:
        return
    sources, targets, mask, columns, column_mask, first_row = tile_of_expert(
        expert, rows_ptr, order_ptr, firsts_ptr, ends_ptr, COLUMNS_IN_ALL, GATE, ROWS, COLUMNS
    )
    ks = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + sources[:, None] * K + ks[None, :]
    weight_ptrs = weight_ptr + (first_row + columns)[None, :] * K + ks[:, None]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    others = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        inside = ks < K - k
        x = tl.load(x_ptrs + k, mask=mask[:, None] & inside[None, :], other=0.0)
        weight_mask = inside[:, None] & column_mask[None, :]
        weight = tl.load(weight_ptrs + k, mask=weight_mask, other=0.0)
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
        if GATE:
            weight = tl.load(weight_ptrs + COLUMNS_IN_ALL * K + k, mask=weight_mask, other=0.0)
            others = tl.dot(x, weight, others, input_precision=PRECISION)
    store_tile(
        out_ptr, sums, others, bias_ptr, targets, mask, columns, column_mask, first_row,
        COLUMNS_IN_ALL, GATE, ACTIVATION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _record_kernel(record_ptr, slots_ptr, ids_ptr, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """Store the ids of each row at its slot. Grid (blocks of ids)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + places // K, mask=places < count, other=-1)
    ids = tl.load(ids_ptr + places, mask=places < count, other=0)
    tl.store(record_ptr + slot * K + places % K, ids.to(tl.int16), mask=slot >= 0)


@triton.jit
def _combine_kernel(
    products_ptr,
    weights_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up a row's weighted products in order. Grid (rows, parts of a row)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(PER_TOKEN):
        product = tl.load(
            products_ptr + (row * PER_TOKEN + k) * WIDTH + columns, mask=inside, other=0.0
        )
        total += product.to(tl.float32) * tl.load(weights_ptr + row * PER_TOKEN + k)
    tl.store(out_ptr + row * WIDTH + columns, total, mask=inside)
