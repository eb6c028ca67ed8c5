"""Layers with a state on a GPU: the gated short convolution, and the gate of attention's output.
The convolution is also the first part of the delta rule (`ops.cuda.delta`).

A program owns one row and some channels. It reads the inputs of preceding rows from the batch if
they are in it, otherwise from the cache, rounded to the cache's dtype in both cases. No program
therefore waits for another, and a row's bits do not depend on chunks.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportUnreachable=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda.rows import aligned
from nano_inference.ops.state import ShortConvWeights, StateView

_COLUMNS = 512  # columns per program: 4 for each of 128 threads
_CHUNKS = tl.constexpr(128)  # chunks read together


def short_conv(
    projected: Tensor,
    weights: ShortConvWeights,
    batch: ForwardBatch,
    view: StateView,
    layer: int,
) -> Tensor:
    """Implement `Ops.short_conv`, rounded to the weights' dtype. Rows with a negative slot are
    padding: they store nothing and have undefined results.
    """
    conv, rows = aligned(weights.conv), len(projected)
    channels, taps = len(conv), conv.shape[2]
    out = torch.empty((rows, channels), dtype=conv.dtype, device=conv.device)
    if rows:
        _short_conv_kernel[(rows, triton.cdiv(channels, _COLUMNS))](
            aligned(projected), conv, None if weights.bias is None else aligned(weights.bias),
            view.column(layer, "inputs"), out, *places_of(batch, view),
            channels, taps, view.block_size, _COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Implement `Ops.sigmoid_gate`. Rows of the gate may be parts of wider rows."""
    x, (rows, width) = aligned(x), x.shape
    out = torch.empty_like(x)
    if rows:
        gate = gate if gate.stride(1) == 1 else gate.contiguous()
        _sigmoid_gate_kernel[(rows, triton.cdiv(width, _COLUMNS))](
            x, gate, out, width, gate.stride(0), _COLUMNS, num_warps=4, enable_fp_fusion=False
        )
    return out


def places_of(batch: ForwardBatch, view: StateView) -> tuple[Any, ...]:
    """Return the arguments by which kernels find the rows of a batch and their stored columns:
    (cu_seqlens_q, positions, slots, block tables, stride on the device or None, stride, units or
    None, chunks).
    """
    return (
        batch.cu_seqlens_q, batch.positions, batch.slot_mapping, batch.block_tables,
        batch.table_stride, batch.block_tables.stride(0), view.unit_row(), len(batch.seq_lens),
    )  # fmt: skip


# arguments of `places_of` that compile no kernel of their own
NOT_SPECIALIZED: dict[str, Any] = {
    "do_not_specialize": ["stride", "num_chunks"],
    "do_not_specialize_on_alignment": [
        *("cu_ptr", "positions_ptr", "slots_ptr", "tables_ptr", "stride_ptr", "units_ptr")
    ],
}


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def chunk_of(cu_ptr, row, num_chunks):
    """Return the index of a row's chunk: the number of chunks that end before the row."""
    chunk = tl.full([], 0, tl.int32)
    for begin in range(0, num_chunks, _CHUNKS):
        index = begin + tl.arange(0, _CHUNKS)
        end = tl.load(cu_ptr + 1 + index, mask=index < num_chunks, other=row + 1)
        chunk += tl.sum((end <= row).to(tl.int32), 0)
    return chunk


@triton.jit
def table_of(tables_ptr, stride_ptr, stride, chunk):
    """Return the address of a chunk's block table."""
    if stride_ptr is not None:
        return tables_ptr + chunk.to(tl.int64) * tl.load(stride_ptr)
    return tables_ptr + chunk.to(tl.int64) * stride


@triton.jit
def unit_of(table_ptr, units_ptr, block, present):
    """Return the unit that backs a block of a sequence, or any unit if it is not present."""
    unit = tl.load(table_ptr + block, mask=present, other=0)
    if units_ptr is not None:
        unit = tl.load(units_ptr + unit, mask=present, other=0)
    return unit


@triton.jit
def _input(
    projected_ptr, row, columns, present, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    GATED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return a row's inputs of the convolution as the cache holds them. If GATED, they are the
    product of the first and the third projection.
    """
    start = projected_ptr + row.to(tl.int64) * WIDTH + columns
    x = tl.load(start, mask=present, other=0.0).to(tl.float32)
    if GATED:
        x = x * tl.load(start + 2 * CHANNELS, mask=present, other=0.0).to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def convolved(
    projected_ptr, weight_ptr, kept_ptr, table_ptr, units_ptr, row, first_row, position,
    columns, inside, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store a row's inputs, and return the convolution of these columns, float32: each column's
    last inputs times its taps, oldest first.
    """
    DTYPE: tl.constexpr = kept_ptr.dtype.element_ty
    total = tl.full(columns.shape, 0.0, tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        at = tl.maximum(position - back, 0)
        # a block of equal flags: the interpreter cannot combine a block and a scalar
        in_batch = row - back + 0 * columns >= first_row
        seen = _input(
            projected_ptr, row - back, columns, inside & in_batch, WIDTH, CHANNELS, GATED, DTYPE
        )  # fmt: skip
        is_stored = (position >= back) & (row - back < first_row)
        unit = unit_of(table_ptr, units_ptr, at // BLOCK_SIZE, is_stored | (back == 0))
        kept = kept_ptr + (unit * BLOCK_SIZE + at % BLOCK_SIZE) * CHANNELS + columns
        if tap == TAPS - 1:
            tl.store(kept, seen, mask=inside)
        else:
            earlier = inside & (position + 0 * columns >= back)
            stored = tl.load(kept, mask=earlier & (row - back + 0 * columns < first_row), other=0.0)
            seen = tl.where(in_batch, seen, stored)
        factor = tl.load(weight_ptr + columns * TAPS + tap, mask=inside, other=0.0)
        total += seen.to(tl.float32) * factor.to(tl.float32)
    return total


@triton.jit(**NOT_SPECIALIZED)
def _short_conv_kernel(
    projected_ptr, weight_ptr, bias_ptr, kept_ptr, out_ptr, cu_ptr, positions_ptr, slots_ptr,
    tables_ptr, stride_ptr, stride, units_ptr, num_chunks, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute some channels of a row. Grid (rows, parts of a row)."""
    row = tl.program_id(0)
    if tl.load(slots_ptr + row) < 0:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < CHANNELS
    chunk = chunk_of(cu_ptr, row, num_chunks)
    table_ptr = table_of(tables_ptr, stride_ptr, stride, chunk)
    mixed = convolved(
        projected_ptr, weight_ptr, kept_ptr, table_ptr, units_ptr, row, tl.load(cu_ptr + chunk),
        tl.load(positions_ptr + row), columns, inside, 3 * CHANNELS, CHANNELS, TAPS, BLOCK_SIZE,
        True,
    )  # fmt: skip
    if bias_ptr is not None:
        mixed += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    start = row.to(tl.int64) * CHANNELS
    after = tl.load(projected_ptr + 3 * start + CHANNELS + columns, mask=inside, other=0.0)
    out = (after.to(tl.float32) * mixed).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + start + columns, out, mask=inside)


@triton.jit
def _sigmoid_gate_kernel(
    x_ptr, gate_ptr, out_ptr, WIDTH: tl.constexpr, GATE_STRIDE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Gate some columns of a row. Grid (rows, parts of a row)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * GATE_STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
    out = (x * sigmoid(gate)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + columns, out, mask=inside)
