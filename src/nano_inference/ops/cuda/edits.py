"""Bias and penalties: what changes logits before they are drawn from. See `sampling.pipeline`."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.softmax import BLOCK, num_blocks
from nano_inference.sampling.sampling_batch import Entries, SamplingBatch

_ENTRIES = 256  # of one program
# Read here and there: another alignment would be another kernel to compile.
_SCALARS = ["entry_rows", "entry_ids", "entry_values", "repetition", "frequency", "presence"]


def edited(logits: Tensor, batch: SamplingBatch) -> Tensor | None:
    """A row of its own for each sample, with bias and penalties: float32 [L, V] -> [R, V].

    None: nothing changes any row, no mask either, and rows may be read where they are.
    """
    if not (batch.masks or len(batch.bias.ids) + len(batch.counts.ids)):
        return None
    num, vocab = len(batch), logits.shape[1]
    changed = torch.empty((num, vocab), device=logits.device)
    _copy_kernel[num, num_blocks(vocab)](
        logits, batch.rows, changed, V=vocab, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )
    if len(batch.bias.ids):
        _edit(batch, changed, batch.bias, counts=False)
    if len(batch.counts.ids):
        _edit(batch, changed, batch.counts, counts=True)
    return changed


def _edit(batch: SamplingBatch, changed: Tensor, entries: Entries, *, counts: bool) -> None:
    count, vocab = len(entries.ids), changed.shape[1]
    penalties = (batch.repetition, batch.frequency, batch.presence)
    _edit_kernel[triton.cdiv(count, _ENTRIES),](
        changed, *entries, *penalties, count,
        V=vocab, COUNTS=counts, SIZE=_ENTRIES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _copy_kernel(
    logits,  # float32 [L, V]
    rows,  # int64 [R]
    changed,  # float32 [R, V], written
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (R, blocks of the vocabulary): a sample's row."""
    sample = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(rows + sample) * V + ids, mask=ids < V, other=0.0)
    tl.store(changed + sample * V + ids, x, mask=ids < V)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_SCALARS)
def _edit_kernel(
    changed,  # float32 [R, V], written where entries are, each at a place of its own
    entry_rows,  # int64 [E]
    entry_ids,  # int64 [E]
    entry_values,  # float32 [E]
    repetition,  # float32 [R]
    frequency,  # float32 [R]
    presence,  # float32 [R]
    count,  # E
    V: tl.constexpr,
    COUNTS: tl.constexpr,  # entries are counts; else they are biases
    SIZE: tl.constexpr,
):
    """Grid (parts of the entries,)."""
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = places < count
    sample = tl.load(entry_rows + places, mask=inside, other=0)
    token = tl.load(entry_ids + places, mask=inside, other=0)
    inside &= (token >= 0) & (token < V)
    value = tl.load(entry_values + places, mask=inside, other=0.0)
    old = tl.load(changed + sample * V + token, mask=inside, other=0.0)
    if COUNTS:
        factor = tl.load(repetition + sample, mask=inside, other=1.0)
        new = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
        once = tl.where(value > 0, tl.load(presence + sample, mask=inside, other=0.0), 0.0)
        new -= tl.load(frequency + sample, mask=inside, other=0.0) * value + once
    else:
        new = old + value
    tl.store(changed + sample * V + token, new, mask=inside)
