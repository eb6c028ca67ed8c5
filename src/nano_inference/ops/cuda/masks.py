"""Masks: what may not be drawn of rows that `edits` has made, and what the rows were before. See
`sampling.masks`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.softmax import BLOCK, block_odds, divisor_of, num_blocks, slope_of
from nano_inference.sampling.sampling_batch import Entries, SamplingBatch

_ENTRIES = 256  # of one program
_TAKE, _PUT, _BAN = (tl.constexpr(i) for i in range(3))


class Uncut(NamedTuple):
    """Rows before masks, of the samples that are masked; of others nothing is said."""

    masked: Tensor  # uint8 [R]
    parts: Tensor  # float32 [2, R, blocks]: maximum and sum of every block of the vocabulary


def cut(logits: Tensor, batch: SamplingBatch) -> Uncut:
    """Put -inf in the place of all that may not be drawn.

    Args:
        logits: float32 [R, V], written.
        batch: R samples, some of them masked.
    """
    num, vocab = logits.shape
    blocks = num_blocks(vocab)
    masked = batch.masked.view(torch.uint8)
    parts = torch.empty((2, num, blocks), device=logits.device)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    _uncut_kernel[num, blocks](
        logits,
        batch.temperature,
        masked,
        parts,
        num,
        V=vocab,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        **options,
    )
    values = torch.empty(len(batch.allowed.ids), device=logits.device)
    _each(logits, batch.allowed, values, _TAKE)
    if len(values):
        restricted = batch.restricted.view(torch.uint8)
        _clear_kernel[num, blocks](logits, restricted, V=vocab, BLOCK=BLOCK, **options)
    _each(logits, batch.allowed, values, _PUT)
    _each(logits, batch.banned, values, _BAN)
    return Uncut(masked, parts)


def _each(logits: Tensor, entries: Entries, values: Tensor, what: tl.constexpr) -> None:
    count = len(entries.ids)
    if count:
        _entries_kernel[triton.cdiv(count, _ENTRIES),](
            logits, entries.rows, entries.ids, values, count,
            V=logits.shape[1], WHAT=what.value, SIZE=_ENTRIES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["temperatures", "masked"])
def _uncut_kernel(
    logits,  # float32 [R, V]
    temperatures,  # float64 [R]
    masked,  # uint8 [R]
    parts,  # float32 [2, R, BLOCKS], written where masked
    num,  # R
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R, BLOCKS): maximum and sum of one block."""
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(masked + sample) != 0:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + sample * V + ids, mask=ids < V, other=-float("inf"))
        divisor, _ = divisor_of(tl.load(temperatures + sample))
        highest, odds = block_odds(x, slope_of(divisor))
        part, size = sample * BLOCKS + block, num.to(tl.int64) * BLOCKS
        tl.store(parts + part, highest)
        tl.store(parts + size + part, tl.sum(odds, axis=0))


@triton.jit(do_not_specialize_on_alignment=["restricted"])
def _clear_kernel(
    logits,  # float32 [R, V], written
    restricted,  # uint8 [R]
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R, blocks of the vocabulary): -inf in rows of which only some tokens are allowed."""
    sample = tl.program_id(0).to(tl.int64)
    if tl.load(restricted + sample) != 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(
            logits + sample * V + ids, tl.full([BLOCK], -float("inf"), tl.float32), mask=ids < V
        )


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["entry_rows", "entry_ids", "values"],
)
def _entries_kernel(
    logits,  # float32 [R, V], written
    entry_rows,  # int64 [E]
    entry_ids,  # int64 [E]
    values,  # float32 [E]; written by _TAKE
    count,  # E
    V: tl.constexpr,
    WHAT: tl.constexpr,  # _TAKE: remember these logits; _PUT: put them back; _BAN: -inf
    SIZE: tl.constexpr,
):
    """Grid (parts of the entries,)."""
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = places < count
    sample = tl.load(entry_rows + places, mask=inside, other=0)
    token = tl.load(entry_ids + places, mask=inside, other=0)
    inside &= (token >= 0) & (token < V)
    target = logits + sample * V + token
    if WHAT == _TAKE:
        tl.store(values + places, tl.load(target, mask=inside, other=0.0), mask=inside)
    elif WHAT == _PUT:
        tl.store(target, tl.load(values + places, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(target, tl.full([SIZE], -float("inf"), tl.float32), mask=inside)
