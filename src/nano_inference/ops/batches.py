"""Batches for the model, built without a scheduler."""

from collections.abc import Sequence as Listed
from typing import Any, NamedTuple

import numpy as np

from nano_inference.arrays import Device, Tensor, namespace
from nano_inference.core import batch as host
from nano_inference.core.batch import layout_of_rows
from nano_inference.core.sequence import POLICY
from nano_inference.sampling.columns import columns_of
from nano_inference.sampling.tensors import arrays_on, dtype_on, to_device

ForwardBatch = host.ForwardBatch[Tensor]


def forward_batch(weight_set: str, device: Device | None = None, **fields: Any) -> ForwardBatch:
    """Return a batch with these fields. Other columns are empty arrays of the host: host arrays if
    they are the device's, otherwise tensors.
    """
    xp = namespace(device)
    absent = {
        name: xp.empty((0,) * len(each.sizes), dtype=dtype_on(device, each.dtype))
        for name, each in columns_of(ForwardBatch).items()
        if name not in fields
    }
    return host.ForwardBatch(weight_set=weight_set, **absent, **fields)


class Rows(NamedTuple):
    """Rows [start, start + len(token_ids)) of one sequence, and the blocks of its context up to the
    last row.
    """

    token_ids: Listed[int]
    start: int
    block_ids: Listed[int]


def batch_of_rows(
    chunks: Listed[Rows],
    block_size: int,
    *,
    draws: Listed[int] = (),
    scores: Listed[tuple[int, int]] = (),
    num_best: int = 0,
    adapters: Listed[Any] = (),
    row_adapters: Listed[int] = (),
    weight_set: str = POLICY,
    device: Device | None = None,
) -> ForwardBatch:
    """Return rows of sequences outside the scheduler as a batch, one chunk per sequence.

    Args:
        chunks: Chunks, at least one.
        block_size: Block size of the KV storage.
        draws: Rows of the batch that need logits, in rising order.
        scores: Pairs of a row of the batch and the token to score after it.
        num_best: Number of most probable tokens to return after each scored row.
        adapters: Adapters of the rows (`ops.lora.Adapter`).
        row_adapters: Index of each row's adapter, -1 for none. Empty without adapters.
        weight_set: Weight set that computes the rows.
        device: Device of the batch. None: tensors on the CPU.
    """
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
    tables = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), dtype=np.int64)
    for table, chunk in zip(tables, chunks, strict=True):
        table[: len(chunk.block_ids)] = chunk.block_ids
    cu_seqlens, row_chunks, positions, slots = layout_of_rows(starts, lengths, tables, block_size)
    xp, arrays = namespace(device), arrays_on(device)
    batch = forward_batch(
        weight_set=weight_set,
        device=device,
        input_ids=arrays.integers([token_id for chunk in chunks for token_id in chunk.token_ids]),
        positions=arrays.make(positions),
        slot_mapping=arrays.make(slots),
        row_chunks=arrays.make(row_chunks),
        block_tables=arrays.make(tables),
        cu_seqlens_q=arrays.make(cu_seqlens),
        seq_lens=arrays.make(starts + lengths),
        logits_indices=arrays.integers(draws),
        score_rows=arrays.integers([row for row, _ in scores]),
        score_targets=arrays.integers([target for _, target in scores]),
        score_temperatures=xp.ones(len(scores), dtype=xp.float64),
        score_mask_rows=xp.full((len(scores),), -1),
        best_rows=arrays.integers([row for row, _ in scores] if num_best else []),
        num_best=num_best,
        adapters=tuple(adapters),
        row_adapters=arrays.integers(row_adapters),
    )
    return batch if device is None else to_device(batch, device)
