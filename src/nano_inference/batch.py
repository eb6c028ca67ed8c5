"""A decision made into tensors: a `ForwardBatch` for the model, a `SamplingBatch` for the draw. Complete at birth."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano_inference.sampling.sampling_batch import DrawRequest, SamplingBatch, sampling_batch
from nano_inference.scheduling.decision import Chunk, SchedulerOutput
from nano_inference.scheduling.sequence import Sequence, Sequences


class Scored(NamedTuple):
    """Rows [start, end) of a sequence, by position, whose next token's logprob a forward computes."""

    seq: Sequence
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one step that one weight set computes. N rows in S chunks; integers are int64."""

    weight_set: str
    input_ids: Tensor  # [N]; rows named by relay_rows hold a placeholder
    positions: Tensor  # [N] absolute position of each row in its sequence
    slot_mapping: Tensor  # [N] where each row's keys and values go: block * block_size + offset
    row_chunks: Tensor  # [N] index of each row's chunk
    block_tables: Tensor  # [S, most blocks of a chunk], padded with 0
    cu_seqlens_q: Tensor  # [S + 1] first row of each chunk, and N
    seq_lens: Tensor  # [S] context length after this step
    logits_indices: Tensor  # [L] rows whose logits are needed
    score_rows: Tensor  # [P] rows of which only the logprob of one given token is wanted
    score_targets: Tensor  # [P] that token: the one which follows the row
    scored: tuple[Scored, ...]  # whose rows these are, in order
    relay_rows: Tensor  # [R] rows whose token the step before is sampling
    relay_sources: Tensor  # [R] where in that step's samples it stands
    num_prompt_tokens: int  # rows that belong to prompts, for the books


def build_batches(
    decision: SchedulerOutput, sequences: Sequences, block_size: int, sampling_now: Mapping[int, int]
) -> tuple[ForwardBatch, ...]:
    """One `ForwardBatch` a weight set, in order of first appearance.

    Args:
        decision: applied already, so that block tables cover its chunks.
        sequences: the live sequences.
        block_size: tokens in a KV block.
        sampling_now: sequence id -> place in the samples of the step in flight, for tokens not known on the host.
    """
    by_set: dict[str, list[Chunk]] = {}
    for chunk in decision.chunks():
        by_set.setdefault(chunk.weight_set, []).append(chunk)
    return tuple(_build(name, chunks, sequences, block_size, sampling_now) for name, chunks in by_set.items())


def _build(
    weight_set: str, chunks: list[Chunk], sequences: Sequences, block_size: int, sampling_now: Mapping[int, int]
) -> ForwardBatch:
    seqs = [sequences.by_id[chunk.seq_id] for chunk in chunks]
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    cu_seqlens = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])

    input_ids: list[int] = []
    relay: list[tuple[int, int]] = []
    for chunk, seq in zip(chunks, seqs, strict=True):
        input_ids += seq.token_ids[chunk.start : chunk.start + chunk.length]
        if chunk.start + chunk.length > len(seq.token_ids):  # its newest token is being sampled right now
            relay.append((len(input_ids), sampling_now[seq.seq_id]))
            input_ids.append(0)

    score_rows: list[int] = []
    score_targets: list[int] = []
    scored: list[Scored] = []
    for chunk, seq, first in zip(chunks, seqs, cu_seqlens.tolist(), strict=False):
        rows = seq.rows_to_score(chunk.start, chunk.start + chunk.length)
        if rows:
            score_rows += range(first + rows.start - chunk.start, first + rows.stop - chunk.start)
            score_targets += seq.token_ids[rows.start + 1 : rows.stop + 1]
            scored.append(Scored(seq, rows.start, rows.stop))

    row_chunks = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(cu_seqlens[-1]) - (cu_seqlens[:-1] - starts)[row_chunks]
    tables = np.zeros((len(chunks), max(len(seq.block_ids) for seq in seqs)), dtype=np.int64)
    for row, seq in enumerate(seqs):
        tables[row, : len(seq.block_ids)] = seq.block_ids
    slots = tables[row_chunks, positions // block_size] * block_size + positions % block_size
    relay_pairs = np.array(relay, dtype=np.int64).reshape(-1, 2)
    prompt_lens = np.array([seq.num_prompt_tokens for seq in seqs])
    return ForwardBatch(
        weight_set=weight_set,
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        row_chunks=torch.from_numpy(row_chunks),
        block_tables=torch.from_numpy(tables),
        cu_seqlens_q=torch.from_numpy(cu_seqlens),
        seq_lens=torch.from_numpy(starts + lengths),
        logits_indices=torch.tensor(
            [int(last) - 1 for chunk, last in zip(chunks, cu_seqlens[1:], strict=True) if chunk.samples],
            dtype=torch.int64,
        ),
        score_rows=torch.tensor(score_rows, dtype=torch.int64),
        score_targets=torch.tensor(score_targets, dtype=torch.int64),
        scored=tuple(scored),
        relay_rows=torch.from_numpy(relay_pairs[:, 0].copy()),
        relay_sources=torch.from_numpy(relay_pairs[:, 1].copy()),
        num_prompt_tokens=int(np.clip(prompt_lens - starts, 0, lengths).sum()),
    )


def build_sampling(
    decision: SchedulerOutput, sampled: list[tuple[Sequence, int]], batches: tuple[ForwardBatch, ...]
) -> SamplingBatch:
    """The draw of a step.

    Args:
        decision: the step.
        sampled: (sequence, position of the token to draw), in the order of the chunks' samples.
        batches: the step's forward batches; their logits stand one after another.
    """
    rows = _logits_rows(decision, batches)
    return sampling_batch(
        [
            DrawRequest(
                seq.params,
                row,
                (seq.seed, seq.sample_index, position),
                prompt=seq.token_ids[: seq.num_prompt_tokens] if seq.params.penalizes else (),
                completion=seq.token_ids[seq.num_prompt_tokens : position] if seq.params.penalizes else (),
                banned=sorted(seq.stop_ids) if position - seq.num_prompt_tokens < seq.params.min_tokens else (),
            )
            for row, (seq, position) in zip(rows, sampled, strict=True)
        ]
    )


def _logits_rows(decision: SchedulerOutput, batches: tuple[ForwardBatch, ...]) -> list[int]:
    """For each sample the row of the step's logits: chunks are grouped by weight set there, not here."""
    next_row: dict[str, int] = {}
    offset = 0
    for batch in batches:
        next_row[batch.weight_set] = offset
        offset += len(batch.logits_indices)
    rows: list[int] = []
    for chunk in decision.chunks():
        if chunk.samples:
            rows += [next_row[chunk.weight_set]] * chunk.samples
            next_row[chunk.weight_set] += 1
    return rows
