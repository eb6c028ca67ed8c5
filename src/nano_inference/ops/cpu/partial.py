"""Implementation of `PartialAttention` on the CPU kernels: states of segments, and their merge."""

import ctypes
from dataclasses import dataclass
from typing import Any, cast

from nano_inference.arrays import Dtype, Tensor, dtype_name, has_dtype, namespace
from nano_inference.ops.cpu.library import struct
from nano_inference.ops.interface import AttentionArgs, KvcacheView, PartialAttention
from nano_inference.parallel.context import SegmentRows

LANES = 16  # partial sums per state


Shape, BatchRows, Problem = (struct(name) for name in ("AttentionShape", "BatchRows", "Problem"))


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Rows in the form that the kernels read: chunks of consecutive positions."""

    rows: Any  # `BatchRows`
    begins: Tensor | None  # [M] first keys, or None if all rows begin at the first key
    kept: tuple[Tensor, ...]  # owners of the memory that `rows` points to
    first_states: Tensor  # [M + 1] index of each row's first state, then the number of states
    block_size: int


def plan_states(rows: SegmentRows, block_size: int) -> SegmentPlan:
    """Implement `PartialAttention.plan`. Consecutive rows that share a table become one chunk."""
    positions, chunks = rows.positions, rows.row_chunks
    xp = namespace(positions)
    begins = xp.ones(len(positions), dtype=xp.bool)
    begins[1:] = (chunks[1:] != chunks[:-1]) | (positions[1:] != positions[:-1] + 1)
    firsts = begins.nonzero()[:, 0]
    row_chunks = begins.cumsum(0) - 1
    bounds = xp.cat([firsts, xp.tensor([len(positions)])])
    kept = (
        positions,
        row_chunks,
        bounds,
        positions[bounds[1:] - 1] + 1,
        rows.block_tables[chunks[firsts]],
    )
    kept = tuple(tensor.contiguous() for tensor in kept)
    positions, row_chunks, bounds, seq_lens, tables = (tensor.data_ptr() for tensor in kept)
    batch = BatchRows(
        len(rows.positions),
        len(firsts),
        positions,
        None,
        row_chunks,
        bounds,
        seq_lens,
        tables,
        kept[-1].shape[1],
    )
    windows = len(rows.begins) > 0 and int(rows.begins.max()) > 0
    return SegmentPlan(
        batch, rows.begins.contiguous() if windows else None, kept, _bounds(rows.counts), block_size
    )


def partial_attention(kernels: ctypes.CDLL, num_threads: int) -> PartialAttention:
    """Return the operations for `num_threads` threads."""

    def states(
        q: Tensor,
        view: KvcacheView,
        layer: int,
        plan: object,
        scores: AttentionArgs,
    ) -> Tensor:
        plan, scale, cap = cast("SegmentPlan", plan), scores.scale, scores.cap
        (num_rows, num_heads, head_dim), keys = q.shape, view.keys
        unit, index = view.places[layer]
        units = None if view.unit_map is None else view.unit_map.units()[unit].data_ptr()
        if (
            not has_dtype(q, view.format.dtype)
            or plan.block_size != keys.shape[3]
            or num_rows != plan.rows.num_rows
        ):
            raise ValueError(
                f"{num_rows} rows of {q.dtype} do not match the plan ({plan.rows.num_rows} rows) "
                f"or the keys ({view.format.dtype})."
            )
        out = namespace(q).empty((int(plan.first_states[-1]), num_heads, 1 + LANES + head_dim))
        shape = Shape(num_heads, keys.shape[1], head_dim, plan.block_size, 0, scale, cap)
        addresses = (units, keys[index].data_ptr(), view.values[index].data_ptr())
        kinds = (has_dtype(q, "bfloat16"), view.format.coded)
        problem = Problem(shape, *kinds, keys.shape[2], *addresses, plan.rows)
        rows = q.contiguous()
        begins = None if plan.begins is None else plan.begins.data_ptr()
        if num_rows and kernels.nano_attention_states(
            ctypes.byref(problem),
            begins,
            rows.data_ptr(),
            plan.first_states.data_ptr(),
            out.data_ptr(),
            num_threads,
        ):
            raise ValueError(
                f"the CPU kernels do not support attention with {num_heads} heads of {head_dim}."
            )
        return out

    def merge(states: Tensor, counts: Tensor, dtype: Dtype, sinks: Tensor | None = None) -> Tensor:
        states, firsts = states.contiguous(), _bounds(counts)
        _, num_heads, width = states.shape
        if sinks is not None and (sinks.shape != (num_heads,) or not has_dtype(sinks, "float32")):
            raise ValueError(
                f"sinks must be float32 ({num_heads},); got {sinks.dtype} {tuple(sinks.shape)}."
            )
        head_dim = width - LANES - 1
        out = namespace(states).empty((len(counts), num_heads * head_dim), dtype=dtype)
        if len(counts):
            kernels.nano_merge_states(
                states.data_ptr(),
                firsts.data_ptr(),
                *(len(counts), num_heads, head_dim, dtype_name(dtype) == "bfloat16"),
                None if sinks is None else sinks.data_ptr(),
                out.data_ptr(),
                num_threads,
            )
        return out

    return PartialAttention(plan_states, states, merge, lambda head_dim: 1 + LANES + head_dim)


def _bounds(counts: Tensor) -> Tensor:
    return namespace(counts).cat([counts.new_zeros(1), counts.cumsum(0)])
