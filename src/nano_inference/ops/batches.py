"""Batches of torch tensors for the model, built without a scheduler."""

from collections.abc import Sequence as Listed
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano_inference.core import batch as host
from nano_inference.core.batch import layout_of_rows
from nano_inference.core.sequence import POLICY
from nano_inference.sampling.columns import columns_of
from nano_inference.sampling.tensors import TORCH, torch_dtype

ForwardBatch = host.ForwardBatch[Tensor]


def forward_batch(weight_set: str, **fields: Any) -> ForwardBatch:
    """Return a batch with these fields. Other columns are empty."""
    absent = {
        name: torch.empty((0,) * len(each.sizes), dtype=torch_dtype(each.dtype))
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
    weight_set: str = POLICY,
) -> ForwardBatch:
    """Return rows of sequences outside the scheduler as a batch on the CPU, one chunk per sequence.

    Args:
        chunks: Chunks, at least one.
        block_size: Block size of the KV storage.
        draws: Rows of the batch that need logits, in rising order.
        scores: Pairs of a row of the batch and the token to score after it.
        num_best: Number of most probable tokens to return after each scored row.
        weight_set: Weight set that computes the rows.
    """
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
    tables = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), dtype=np.int64)
    for table, chunk in zip(tables, chunks, strict=True):
        table[: len(chunk.block_ids)] = chunk.block_ids
    cu_seqlens, row_chunks, positions, slots = layout_of_rows(starts, lengths, tables, block_size)
    return forward_batch(
        weight_set=weight_set,
        input_ids=TORCH.integers([token_id for chunk in chunks for token_id in chunk.token_ids]),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        row_chunks=torch.from_numpy(row_chunks),
        block_tables=torch.from_numpy(tables),
        cu_seqlens_q=torch.from_numpy(cu_seqlens),
        seq_lens=torch.from_numpy(starts + lengths),
        logits_indices=TORCH.integers(draws),
        score_rows=TORCH.integers([row for row, _ in scores]),
        score_targets=TORCH.integers([target for _, target in scores]),
        score_temperatures=torch.ones(len(scores), dtype=torch.float64),
        score_mask_rows=torch.full((len(scores),), -1),
        best_rows=TORCH.integers([row for row, _ in scores] if num_best else []),
        num_best=num_best,
    )
