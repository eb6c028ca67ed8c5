"""Rows stored, computed and requested by each rank: pure functions of a batch, against a plain
definition.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import EngineConfig
from nano_inference.errors import ConfigError
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.parallel.context import SEGMENT, ContextSplit, ContextStep, own_rows
from tests.depth import at_depth


@st.composite
def splits(draw: st.DrawFn) -> ContextSplit:
    size = draw(st.sampled_from([1, 2, 4]))
    return ContextSplit(size, SEGMENT * size * draw(st.integers(1, 3)))


@st.composite
def batches(draw: st.DrawFn, split: ContextSplit) -> ForwardBatch:
    chunks: list[Rows] = []
    for index in range(draw(st.integers(1, 4))):
        start, count = draw(st.integers(0, 5000)), draw(st.sampled_from([1, 1, 3, 60, 400]))
        blocks = range(100 * index, 100 * index + -(-(start + count) // split.block_size))
        chunks.append(Rows(list(range(start, start + count)), start, blocks))
    ends = torch.tensor([len(chunk.token_ids) for chunk in chunks]).cumsum(0).tolist()
    rows = st.lists(st.integers(0, ends[-1] - 1), unique=True, max_size=9).map(sorted)
    scores = [(row, row % 7) for row in draw(rows)]
    return batch_of_rows(
        chunks, split.block_size, draws=[end - 1 for end in ends], scores=scores, num_best=2
    )


def brought_together(parts: list[torch.Tensor], order: torch.Tensor) -> list[int]:
    return torch.cat(parts)[order].tolist()


@settings(max_examples=at_depth(60), deadline=None)
@given(data=st.data())
def test_row_is_computed_and_stored_once(data: st.DataObject) -> None:
    split = data.draw(splits())
    batch = data.draw(batches(split))
    parts = [own_rows(batch, split, rank) for rank in range(split.size)]
    steps: list[ContextStep] = [part.context for part in parts]
    assert sorted(torch.cat([step.rows for step in steps]).tolist()) == list(
        range(len(batch.input_ids))
    )
    stored: dict[tuple[int, int], int] = {}  # (rank, slot) -> slot of whole blocks
    for rank, (part, step) in enumerate(zip(parts, steps, strict=True)):
        assert torch.equal(part.input_ids, batch.input_ids[step.rows])
        for row, slot, position in zip(
            step.rows.tolist(), part.slot_mapping.tolist(), part.positions.tolist(), strict=True
        ):
            block, offset = divmod(position, split.block_size)
            table = batch.block_tables[batch.row_chunks[row]]
            assert slot == int(table[block]) * split.run + offset - rank * split.run
            assert 0 <= offset - rank * split.run < split.run
            assert stored.setdefault((rank, slot), int(batch.slot_mapping[row])) == int(
                batch.slot_mapping[row]
            )
        assert part.cu_seqlens_q[-1] == len(part.input_ids)
        for chunk, (first, last) in enumerate(pairwise(part.cu_seqlens_q.tolist())):
            assert (part.row_chunks[first:last] == chunk).all()
    for wanted, rejoining in (
        ("logits_indices", "logits"),
        ("score_rows", "scores"),
        ("best_rows", "best"),
    ):
        rank_rows = [step.rows[getattr(step, rejoining).own_rows] for step in steps]
        for step in steps:
            assert (
                brought_together(rank_rows, getattr(step, rejoining).order)
                == getattr(batch, wanted).tolist()
            )
        assert [getattr(part, wanted).tolist() for part in parts] == [
            getattr(s, rejoining).own_rows.tolist() for s in steps
        ]
    targets = [part.score_targets for part in parts]
    assert brought_together(targets, steps[0].scores.order) == batch.score_targets.tolist()


@settings(max_examples=at_depth(40), deadline=None)
@given(
    data=st.data(),
    window=st.sampled_from([0, 0, 1, 100, 512, 1700]),
    most=st.sampled_from([20, 400, 10**6]),
)
def test_row_merges_all_its_segments_in_order(data: st.DataObject, window: int, most: int) -> None:
    split = data.draw(splits())
    batch = data.draw(batches(split))
    parts = [own_rows(batch, split, rank, [window], most) for rank in range(split.size)]
    steps: list[ContextStep] = [part.context for part in parts]
    merged: dict[int, list[int]] = {}  # row -> segments
    for pieces in zip(*(step.pieces[window] for step in steps), strict=True):
        rows = [step.rows for step in steps]
        states: list[list[torch.Tensor]] = []  # per rank: its answers to each peer
        for rank, piece in enumerate(pieces):
            asked = torch.cat(
                [own[each.queries[rank]] for own, each in zip(rows, pieces, strict=True)]
            )[piece.arrived]
            assert asked.tolist() == sorted(asked.tolist())  # in batch order
            pairs: list[tuple[int, int]] = []
            for row, begin, last in zip(
                asked.tolist(),
                piece.rows.begins.tolist(),
                piece.rows.positions.tolist(),
                strict=True,
            ):
                for local in range(begin // SEGMENT, last // SEGMENT + 1):
                    pairs.append((row, int(split.segments(torch.tensor(local), rank))))
            assert len(pairs) == int(piece.rows.counts.sum())
            together = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
            states.append([together[each] for each in piece.answers])
        total = 0
        for rank, piece in enumerate(pieces):
            answers = torch.cat([each[rank] for each in states])[piece.order]
            rank_rows = rows[rank][piece.own_rows].repeat_interleave(piece.counts)
            assert answers[:, 0].tolist() == rank_rows.tolist()
            for row, segment in answers.tolist():
                merged.setdefault(row, []).append(segment)
            total += len(answers)
        assert total <= most
    for row, position in enumerate(batch.positions.tolist()):
        first = max(0, position - window + 1) if window else 0
        assert merged[row] == list(range(first // SEGMENT, position // SEGMENT + 1))


@settings(max_examples=at_depth(30), deadline=None)
@given(split=splits(), positions=st.lists(st.integers(0, 9000), min_size=1))
def test_stored_rows_of_a_rank_are_counted(split: ContextSplit, positions: list[int]) -> None:
    owners = split.owners(torch.arange(9001))
    for rank in range(split.size):
        counted = split.stored(torch.tensor(positions), rank).tolist()
        assert counted == [int((owners[:position] == rank).sum()) for position in positions]


def test_indivisible_blocks_are_rejected_with_a_valid_size() -> None:
    with pytest.raises(
        ConfigError, match=r"block_size=16 must be a multiple of 1024 .*; use block_size=1024"
    ):
        EngineConfig(model_path="smollm2-135m", context_parallel=2)
    with pytest.raises(
        ConfigError, match=r"block_size=4097 must be a multiple of 2048 .*; use block_size=6144"
    ):
        EngineConfig(model_path="smollm2-135m", context_parallel=4, block_size=4097)
    with pytest.raises(
        ConfigError, match="context_parallel=2 is not possible with attention='flex'"
    ):
        EngineConfig(
            model_path="smollm2-135m", context_parallel=2, block_size=1024, attention="flex"
        )
    assert (
        EngineConfig(model_path="smollm2-135m", context_parallel=4, block_size=2048).block_size
        == 2048
    )
