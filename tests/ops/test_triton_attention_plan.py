"""The plan of paged attention covers every visible key of every row exactly once and stays within
its limits.
"""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.cuda.attention_plan import Bounds, Items, plan_items
from tests.depth import at_depth

pytest.importorskip("triton")

BLOCK_SIZE = 8


@dataclass(frozen=True)
class Case:
    chunks: list[tuple[int, int]]  # number of rows, and of keys before them
    window: int
    split: int
    short: int
    tile_rows: tuple[int, ...]
    bounds: Bounds
    part_is_split: bool

    def plan(self, batch: ForwardBatch) -> list[Items]:
        return plan_items(
            batch,
            self.window,
            split=self.split,
            short=self.short,
            tile_rows=self.tile_rows,
            kv_heads=2,
            bounds=self.bounds,
            part_is_split=self.part_is_split,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    most = draw(st.sampled_from([1, 5, 40]))
    chunks = draw(
        st.lists(st.tuples(st.integers(0, most), st.integers(0, 300)), min_size=1, max_size=6)
    )
    chunks = [(rows, before if rows else 0) for rows, before in chunks]
    short = draw(st.integers(1, 4))
    return Case(
        chunks,
        window=draw(st.sampled_from([0, 1, 33, 100])),
        split=draw(st.sampled_from([8, 32])),
        short=short,
        tile_rows=draw(st.sampled_from([(3,), (short + 1, 16), (7,)])),
        bounds=Bounds(draw(st.integers(1, 30)), draw(st.integers(1, 200))),
        part_is_split=draw(st.booleans()),
    )


def batch_of(chunks: list[tuple[int, int]]) -> ForwardBatch:
    blocks = range(-(-max(sum(chunk) for chunk in chunks) // BLOCK_SIZE) or 1)
    rows = [Rows([0] * count, before, blocks) for count, before in chunks]
    if not any(count for count, _ in chunks):
        rows = [Rows([0], 0, blocks)]
    return batch_of_rows(rows, BLOCK_SIZE)


@pytest.mark.thorough
@settings(max_examples=at_depth(40), deadline=None)
@given(cases())
def test_plan_covers_every_key_of_a_row_once(case: Case) -> None:
    batch = batch_of(case.chunks)
    seen: dict[int, list[tuple[int, int]]] = {}  # per row: splits of its items, in part order
    places: set[int] = set()
    for kind, items in enumerate(case.plan(batch)):
        count = int(items.count)
        assert count <= items.capacity
        rows_of_kind = batch.cu_seqlens_q.diff().tolist()
        counters: dict[int, int] = {}
        shared = 0
        for fields in items.items[:count].tolist():
            table, row, rows, position, low, high, first_slot, part, parts, taking, counter = (
                fields[:11]
            )
            if low >= high:
                continue
            chunk = int(batch.row_chunks[row])
            assert table == chunk * batch.block_tables.stride(0)
            assert len(case.tile_rows) == 1 or (rows_of_kind[chunk] > case.short) == kind
            assert 0 < rows <= case.tile_rows[kind]
            assert batch.positions[row : row + rows].tolist() == list(
                range(position, position + rows)
            )
            for place_of in range(row, row + rows):
                seen.setdefault(place_of, []).append((low, high))
            if taking == 1:
                assert first_slot == -1
                continue
            shared += 1
            counters[counter] = counters.get(counter, 0) + 1
            assert not items.counters[counter].any()
            parts_of_row = range(part, part + (high - low if case.part_is_split else 1))
            assert parts_of_row.stop <= parts
            slots = {
                first_slot + number * rows + one for number in parts_of_row for one in range(rows)
            }
            assert not slots & places, "two items have the same part of the workspace"
            assert max(slots) < case.bounds.row_parts
            places |= slots
            assert (
                items.items[:count, 9][
                    (items.items[:count, 10] == counter) & (items.items[:count, 6] >= 0)
                ]
                .eq(taking)
                .all()
            )
        assert shared - len(counters) <= case.bounds.items
        assert len(counters) <= case.bounds.items
        places.clear()  # kinds run one after another
    for row, position in enumerate(batch.positions.tolist()):
        ranges = sorted(seen.pop(row))
        first = max(0, position - case.window + 1) // case.split if case.window else 0
        assert ranges[0][0] <= first
        assert ranges[-1][1] > position // case.split
        assert all(end == start for (_, end), (start, _) in pairwise(ranges))
    assert not seen


def test_plan_splits_a_long_row_but_not_many_short_rows() -> None:
    case = Case([(1, 255)], 0, 8, 1, (4,), Bounds(16, 100), part_is_split=True)
    (items,) = case.plan(batch_of(case.chunks))
    assert int(items.count) == 16  # two splits each; one each would be 31 extra
    (items,) = case.plan(batch_of([(1, 31)] * 20))
    assert int(items.count) == 20
    assert torch.equal(items.items[:20, 6], torch.full((20,), -1))
