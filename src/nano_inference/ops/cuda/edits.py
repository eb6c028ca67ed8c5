"""Bias, allowed tokens and penalties: what changes logits before they are drawn from. See `sampling.pipeline`."""

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
_SCALARS = ["rows", "entry_rows", "entry_ids", "entry_values", "repetition", "frequency", "presence"]


def edited(logits: Tensor, batch: SamplingBatch) -> Tensor | None:
    """A row of its own for each sample, with what the batch changes: float32 [L, V] -> [R, V]. None: nothing is."""
    biased = len(batch.bias.ids) + len(batch.allowed.ids) > 0
    if not biased and not len(batch.counts.ids):
        return None
    num, vocab = len(batch), logits.shape[1]
    changed = torch.empty((num, vocab), device=logits.device)
    _copy_kernel[num, num_blocks(vocab)](
        logits, batch.rows, batch.restricted.view(torch.uint8), changed,
        V=vocab, BLOCK=BLOCK, RESTRICTS=biased, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    for kind, entries in enumerate((batch.allowed, batch.bias, batch.counts)):
        if len(entries.ids):
            _edit(logits, batch, changed, entries, kind)
    return changed


def _edit(logits: Tensor, batch: SamplingBatch, changed: Tensor, entries: Entries, kind: int) -> None:
    count, vocab = len(entries.ids), logits.shape[1]
    penalties = (batch.repetition, batch.frequency, batch.presence)
    _edit_kernel[triton.cdiv(count, _ENTRIES),](
        logits, batch.rows, changed, *entries, *penalties, count,
        V=vocab, KIND=kind, SIZE=_ENTRIES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["rows", "restricted"])
def _copy_kernel(
    logits,  # float32 [L, V]
    rows,  # int64 [R]
    restricted,  # uint8 [R]
    changed,  # float32 [R, V], written
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    RESTRICTS: tl.constexpr,
):
    """Grid (R, blocks of the vocabulary): a sample's row; -inf where only some tokens are allowed."""
    sample = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(rows + sample) * V + ids, mask=ids < V, other=0.0)
    if RESTRICTS:
        x = tl.where(tl.load(restricted + sample) != 0, -float("inf"), x)
    tl.store(changed + sample * V + ids, x, mask=ids < V)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_SCALARS)
def _edit_kernel(
    logits,  # float32 [L, V]
    rows,  # int64 [R]
    changed,  # float32 [R, V], written where entries are, each at a place of its own
    entry_rows,  # int64 [E]
    entry_ids,  # int64 [E]
    entry_values,  # float32 [E]
    repetition,  # float32 [R]
    frequency,  # float32 [R]
    presence,  # float32 [R]
    count,  # E
    V: tl.constexpr,
    KIND: tl.constexpr,  # 0: allowed, 1: bias, 2: counts
    SIZE: tl.constexpr,
):
    """Grid (parts of the entries,)."""
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = places < count
    sample = tl.load(entry_rows + places, mask=inside, other=0)
    token = tl.load(entry_ids + places, mask=inside, other=0)
    inside &= (token >= 0) & (token < V)
    value = tl.load(entry_values + places, mask=inside, other=0.0)
    if KIND == 0:
        row = tl.load(rows + sample, mask=inside, other=0)
        new = tl.load(logits + row * V + token, mask=inside, other=0.0) + value
    else:
        old = tl.load(changed + sample * V + token, mask=inside, other=0.0)
        if KIND == 1:
            new = old + value
        else:
            factor = tl.load(repetition + sample, mask=inside, other=1.0)
            new = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
            once = tl.where(value > 0, tl.load(presence + sample, mask=inside, other=0.0), 0.0)
            new -= tl.load(frequency + sample, mask=inside, other=0.0) * value + once
    tl.store(changed + sample * V + token, new, mask=inside)
