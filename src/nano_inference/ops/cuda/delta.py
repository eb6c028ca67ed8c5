"""The gated delta rule on a GPU (arXiv:2412.06464), in three launches for all rows of a step:

1. `_prepare_kernel`: convolution, norms of queries and keys, decays and betas. One program for each
   row and key head.
2. `_rule_kernel`: the rule. One program for each chunk, value head and slice of columns of its
   matrix. It goes through the chunk block by block, and through the matrix in parts of a few rows.
3. `_finish_kernel`: norm and gate of the outputs, which need all columns of a head.

The rule is computed in the chunked form (arXiv:2406.06484), for the blocks of the cache, whose
boundaries are absolute positions. Within a block, products with the matrix and of keys with keys
are matrix products of all rows. The corrections u depend on each other and are computed row by
row. A decode is a block with one row: keys, corrections and decays of the earlier rows come from
the cache, and the matrix is read once.

A row has the same lane of its block's tile in every batch. All matrix products have the same shape,
and an element of a product depends only on its row and its column. So the bits of a row do not
depend on chunks. Products have three passes of TF32 (`tf32x3`), with about the precision of
float32.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportUnreachable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda.rows import aligned
from nano_inference.ops.cuda.state import (
    NOT_SPECIALIZED,
    chunk_of,
    convolved,
    places_of,
    sigmoid,
    table_of,
    unit_of,
)
from nano_inference.ops.state import DeltaWeights, StateView

# by lanes of a block: columns of a matrix per program, rows that are in registers together, warps.
# Four programs a head of 128 fill an H100 at one row.
TILINGS = {16: (32, 32, 4), 32: (16, 16, 4)}
_LEAST = 16  # least size of a matrix product
_HEADS = 8  # heads per program of the last kernel
_L2_EPS = tl.constexpr(1e-6)  # epsilon in the norms of queries and keys
_PRECISION = tl.constexpr("tf32x3")


def delta_net(
    projected: Tensor, weights: DeltaWeights, batch: ForwardBatch, view: StateView, layer: int
) -> Tensor:
    """Implement `Ops.delta_net`, rounded to the weights' dtype. Rows with a negative slot are
    padding: they store nothing and have undefined results.
    """
    heads, value_dim, key_heads, key_dim = (
        *(weights.value_heads, weights.value_dim),
        *(weights.key_heads, weights.key_dim),
    )
    rows, device, conv = len(projected), projected.device, aligned(weights.conv)
    out = torch.empty((rows, weights.width), dtype=conv.dtype, device=device)
    if not rows:
        return out
    projected, places = aligned(projected), places_of(batch, view)
    queries = torch.empty((rows, key_heads, key_dim), dtype=torch.float32, device=device)
    values = torch.empty((rows, heads, value_dim), dtype=torch.float32, device=device)
    # decay and beta of each head
    rates = torch.empty((rows, 2, heads), dtype=torch.float32, device=device)
    attended = torch.empty_like(values)
    inputs, keys, kept, decays, state = (
        view.column(layer, name) for name in ("inputs", "keys", "values", "decays", "state")
    )
    sizes = (key_heads, heads // key_heads, key_dim, value_dim)
    _prepare_kernel[(rows, key_heads)](
        projected, conv, weights.log_decay, weights.decay_bias, inputs, keys, queries, values,
        rates, key_dim**-0.5, *places, *sizes, conv.shape[2], view.block_size,
        triton.next_power_of_2(2 * key_dim + heads // key_heads * value_dim),
        triton.next_power_of_2(heads // key_heads), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    lanes = max(triton.next_power_of_2(view.block_size), _LEAST)
    most_columns, depth, num_warps = TILINGS[lanes]
    width = min(max(triton.next_power_of_2(value_dim), _LEAST), most_columns)
    _rule_kernel[(len(batch.seq_lens), heads * triton.cdiv(value_dim, width))](
        queries, values, rates, attended, keys, kept, decays, state, *places, *sizes,
        view.block_size, lanes, min(max(triton.next_power_of_2(key_dim), _LEAST), depth), width,
        num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    group = min(triton.next_power_of_2(heads), _HEADS)
    _finish_kernel[(rows, triton.cdiv(heads, group))](
        attended, projected, aligned(weights.norm), out, weights.eps, *sizes, weights.in_tiles,
        group, triton.next_power_of_2(value_dim), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _log1p(y):
    """Return log(1 + y) for y in [0, 1] without loss for small y."""
    whole = 1 + y
    return tl.where(whole == 1, y, tl.log(whole) * (y / tl.where(whole == 1, 1.0, whole - 1)))


@triton.jit(**NOT_SPECIALIZED)
def _prepare_kernel(
    projected_ptr, weight_ptr, log_decay_ptr, decay_bias_ptr, inputs_ptr, keys_ptr, queries_ptr,
    values_ptr, rates_ptr, scale, cu_ptr, positions_ptr, slots_ptr, tables_ptr, stride_ptr, stride,
    units_ptr, num_chunks, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Compute one key head of a row, and the value heads that it serves. Grid (rows, key heads).
    The key is stored in the cache, all else for the next kernel.
    """
    VALUES: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUES * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + VALUES * VALUE_DIM + 2 * VALUES
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(slots_ptr + row) < 0:
        return
    chunk = chunk_of(cu_ptr, row, num_chunks)
    first_row, position = tl.load(cu_ptr + chunk), tl.load(positions_ptr + row)
    table_ptr = table_of(tables_ptr, stride_ptr, stride, chunk)
    lane = tl.arange(0, WIDE)  # the query, the key, then the values of the heads
    is_query, is_key = lane < KEY_DIM, (lane >= KEY_DIM) & (lane < 2 * KEY_DIM)
    is_value = (lane >= 2 * KEY_DIM) & (lane < 2 * KEY_DIM + GROUP * VALUE_DIM)
    key_columns = (KEY_HEADS + head - 1) * KEY_DIM + lane
    value_columns = 2 * (KEY_HEADS - 1) * KEY_DIM + head * (GROUP * VALUE_DIM) + lane
    columns = tl.where(is_key, key_columns, value_columns)
    columns = tl.where(is_query, head * KEY_DIM + lane, columns)
    x = convolved(
        projected_ptr, weight_ptr, inputs_ptr, table_ptr, units_ptr, row, first_row, position,
        columns, lane < 2 * KEY_DIM + GROUP * VALUE_DIM, WIDTH, CHANNELS, TAPS, BLOCK_SIZE, False,
    )  # fmt: skip
    x = x * sigmoid(x)
    query_factor = tl.rsqrt(tl.sum(tl.where(is_query, x * x, 0.0), 0) + _L2_EPS) * scale
    key_factor = tl.rsqrt(tl.sum(tl.where(is_key, x * x, 0.0), 0) + _L2_EPS)
    x = x * tl.where(is_query, query_factor, tl.where(is_key, key_factor, 1.0))
    row = row.to(tl.int64)
    slot = unit_of(table_ptr, units_ptr, position // BLOCK_SIZE, True) * BLOCK_SIZE
    slot += position % BLOCK_SIZE
    start = (row * KEY_HEADS + head) * KEY_DIM
    tl.store(queries_ptr + start + lane, x, mask=is_query)
    start = (slot * KEY_HEADS + head) * KEY_DIM - KEY_DIM
    tl.store(keys_ptr + start + lane, x, mask=is_key)
    start = (row * KEY_HEADS + head) * (GROUP * VALUE_DIM) - 2 * KEY_DIM
    tl.store(values_ptr + start + lane, x, mask=is_value)

    index = tl.arange(0, HEADS)
    there = index < GROUP
    index += head * GROUP
    numbers = projected_ptr + row * WIDTH + CHANNELS + VALUES * VALUE_DIM + index
    beta = sigmoid(tl.load(numbers, mask=there, other=0.0).to(tl.float32))
    x = tl.load(numbers + VALUES, mask=there, other=0.0).to(tl.float32)
    x += tl.load(decay_bias_ptr + index, mask=there, other=0.0)
    softplus = tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x)))
    rate = -tl.exp(tl.load(log_decay_ptr + index, mask=there, other=0.0)) * softplus
    rates = rates_ptr + row * (2 * VALUES) + index
    tl.store(rates, rate, mask=there)
    tl.store(rates + VALUES, beta, mask=there)


@triton.jit(**NOT_SPECIALIZED)
def _rule_kernel(
    queries_ptr, values_ptr, rates_ptr, out_ptr, keys_ptr, kept_ptr, decays_ptr, states_ptr,
    cu_ptr, positions_ptr, slots_ptr, tables_ptr, stride_ptr, stride, units_ptr, num_chunks,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Apply the rule to the rows of a chunk, for some columns of one head. Grid (chunks, heads *
    slices).

    With the notation of `ops.reference.state`: a row's u = beta (v - A S^T k - sum over earlier j
    of A_j (k_j . k) u_j). Its output is A S^T q + sum over j, the row itself included, of A_j (k_j
    . q) u_j. A block's end stores A S + sum of A_j k_j u_j^T.
    """
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    SLICES: tl.constexpr = (VALUE_DIM + WIDE - 1) // WIDE
    chunk = tl.program_id(0)
    first_row, end_row = tl.load(cu_ptr + chunk), tl.load(cu_ptr + chunk + 1)
    if first_row >= end_row:
        return
    head, part = tl.program_id(1) // SLICES, tl.program_id(1) % SLICES
    table_ptr = table_of(tables_ptr, stride_ptr, stride, chunk)
    position = tl.load(positions_ptr + first_row).to(tl.int32)
    end = position + (end_row - first_row).to(tl.int32)

    lane, deep = tl.arange(0, LANES), tl.arange(0, DEEP)
    wide = part * WIDE + tl.arange(0, WIDE)
    has_value = (wide < VALUE_DIM)[None, :]
    states_ptr += head * (KEY_DIM * VALUE_DIM) + deep[:, None] * VALUE_DIM + wide[None, :]
    first = position // BLOCK_SIZE
    before = unit_of(table_ptr, units_ptr, tl.maximum(first - 1, 0), first > 0)
    for block in range(first, (end + BLOCK_SIZE - 1) // BLOCK_SIZE):
        # lanes [low, high) are rows of the batch, and lanes below them are in the cache
        low = tl.maximum(position - block * BLOCK_SIZE, 0)
        high = tl.minimum(end - block * BLOCK_SIZE, BLOCK_SIZE)
        fresh, earlier, known = (lane >= low) & (lane < high), lane < low, lane < high
        unit = unit_of(table_ptr, units_ptr, block, True)
        slot = unit * BLOCK_SIZE + lane
        row = first_row + (block * BLOCK_SIZE - position) + lane
        value_at = (row * HEADS + head)[:, None] * VALUE_DIM + wide[None, :]
        values = tl.load(values_ptr + value_at, mask=fresh[:, None] & has_value, other=0.0)
        kept_at = (slot * HEADS + head)[:, None] * VALUE_DIM + wide[None, :]
        u = tl.load(kept_ptr + kept_at, mask=earlier[:, None] & has_value, other=0.0)
        decays = tl.load(decays_ptr + slot * HEADS + head, mask=earlier, other=0.0)
        rate_at = row * (2 * HEADS) + head
        rates = tl.load(rates_ptr + rate_at, mask=fresh, other=0.0)
        betas = tl.load(rates_ptr + rate_at + HEADS, mask=fresh, other=0.0)

        # products with the matrix and with keys, of all rows, in parts of the keys' numbers
        by_key = tl.full([LANES, LANES], 0.0, tl.float32)
        by_query = tl.full([LANES, LANES], 0.0, tl.float32)
        of_key = tl.full([LANES, WIDE], 0.0, tl.float32)
        of_query = tl.full([LANES, WIDE], 0.0, tl.float32)
        has_state = block + 0 * deep > 0
        key_at = keys_ptr + (slot * KEY_HEADS + head // GROUP)[:, None] * KEY_DIM + deep[None, :]
        query_at = queries_ptr + (row * KEY_HEADS + head // GROUP)[:, None] * KEY_DIM
        for start in range(0, KEY_DIM, DEEP):
            inside = deep < KEY_DIM - start
            keys = tl.load(key_at + start, mask=known[:, None] & inside[None, :], other=0.0)
            queries = tl.load(
                query_at + (start + deep[None, :]), mask=fresh[:, None] & inside[None, :], other=0.0
            )
            state = tl.load(
                states_ptr + before * (HEADS * KEY_DIM * VALUE_DIM) + start * VALUE_DIM,
                mask=(inside & has_state)[:, None] & has_value, other=0.0,
            )  # fmt: skip
            by_key = tl.dot(keys, tl.trans(keys), by_key, input_precision=_PRECISION)
            by_query = tl.dot(queries, tl.trans(keys), by_query, input_precision=_PRECISION)
            of_key = tl.dot(keys, state, of_key, input_precision=_PRECISION)
            of_query = tl.dot(queries, state, of_query, input_precision=_PRECISION)

        decay = tl.sum(tl.where(lane == low - 1, decays, 0.0), 0)
        for now in range(low, high):
            decay += tl.sum(tl.where(lane == now, rates, 0.0), 0)
            decays = tl.where(lane == now, decay, decays)
        whole = tl.exp(decays)[:, None]
        u = tl.where(fresh[:, None], betas[:, None] * (values - whole * of_key), u)
        # column t: factors of the earlier u that row t subtracts
        subtracts = (lane[:, None] < lane[None, :]) & fresh[None, :]
        since = tl.exp(tl.where(subtracts, decays[None, :] - decays[:, None], 0.0))
        factors = tl.where(subtracts, betas[None, :] * since * by_key, 0.0)
        for now in range(low, high):
            factor = tl.sum(tl.where((lane == now)[None, :], factors, 0.0), 1)
            subtracted = tl.where((lane < now)[:, None], factor[:, None] * u, 0.0)
            selected = (lane == now)[:, None]
            u = tl.where(selected, tl.sum(tl.where(selected, u, -subtracted), 0)[None, :], u)

        visible = (lane[None, :] <= lane[:, None]) & fresh[:, None]
        since = tl.exp(tl.where(visible, decays[:, None] - decays[None, :], 0.0))
        scores = tl.where(visible, since * by_query, 0.0)
        out = tl.dot(scores, u, whole * of_query, input_precision=_PRECISION)
        tl.store(out_ptr + value_at, out, mask=fresh[:, None] & has_value)
        tl.store(kept_ptr + kept_at, u, mask=fresh[:, None] & has_value)
        tl.store(decays_ptr + slot * HEADS + head, decays, mask=fresh & (part + 0 * lane == 0))
        if high == BLOCK_SIZE:
            left = tl.exp(tl.where(known, decay - decays, 0.0))[:, None]
            for start in range(0, KEY_DIM, DEEP):
                inside = deep < KEY_DIM - start
                there = inside[:, None] & has_value
                keys = tl.load(key_at + start, mask=known[:, None] & inside[None, :], other=0.0)
                state = tl.load(
                    states_ptr + before * (HEADS * KEY_DIM * VALUE_DIM) + start * VALUE_DIM,
                    mask=there & has_state[:, None], other=0.0,
                )  # fmt: skip
                state = tl.dot(
                    tl.trans(left * keys), u, tl.exp(decay) * state, input_precision=_PRECISION
                )
                tl.store(
                    states_ptr + unit * (HEADS * KEY_DIM * VALUE_DIM) + start * VALUE_DIM, state,
                    mask=there,
                )  # fmt: skip
            tl.debug_barrier()  # the next block reads what other threads have stored
        before = unit


@triton.jit
def _finish_kernel(
    attended_ptr, projected_ptr, norm_ptr, out_ptr, eps, KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, IN_TILES: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Norm and gate some heads of a row. Grid (rows, parts of the heads)."""
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + HEADS * VALUE_DIM + 2 * HEADS
    row = tl.program_id(0).to(tl.int64)
    head, value = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    inside = (head < HEADS)[:, None] & (value < VALUE_DIM)[None, :]
    at = head[:, None] * VALUE_DIM + value[None, :]
    x = tl.load(attended_ptr + row * (HEADS * VALUE_DIM) + at, mask=inside, other=0.0)
    z = tl.load(projected_ptr + row * WIDTH + CHANNELS + at, mask=inside, other=0.0)
    z = z.to(tl.float32)
    factor = tl.load(norm_ptr + value, mask=value < VALUE_DIM, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / VALUE_DIM + eps)[:, None] * factor[None, :]
    if IN_TILES:
        head = head % GROUP * KEY_HEADS + head // GROUP
        at = head[:, None] * VALUE_DIM + value[None, :]
    out = (x * (z * sigmoid(z))).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * (HEADS * VALUE_DIM) + at, out, mask=inside)
