"""Paged attention in Triton agrees with the specification. Under the law, a row's bits do not
depend on other rows.
"""

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cuda import attention
from nano_inference.ops.cuda.attention import Attention, HeadShape
from nano_inference.ops.interface import AttentionArgs
from tests.depth import at_depth
from tests.ops.triton_attention import (
    Heads,
    Memory,
    Piece,
    Rows3,
    attend,
    draw,
    padded,
    place,
    reference,
)

pytest.importorskip("triton")

KEY_TILE, SPLIT = 16, 32
MIX = (Piece(0, 36, 37), Piece(1, 0, 21), Piece(2, 90, 101), Piece(3, 129, 130), Piece(4, 0, 1))
LENGTHS = tuple(piece.end for piece in MIX)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
HALF = torch.float16


def small(*, batch_invariant: bool, shared_items: int = 6, row_parts: int = 40) -> Attention:
    """Return attention with tiles and splits small enough for the interpreter."""
    return Attention(
        batch_invariant=batch_invariant,
        key_tile=KEY_TILE,
        split=SPLIT,
        shared_items=shared_items,
        row_parts=row_parts,
    )


@pytest.mark.thorough(
    but=[
        "heads8-20-memory8-False",
        "heads8-20-memory8-True",
        "heads9-0-memory9-False",
        "heads9-0-memory9-True",
        "heads10-0-memory10-False",
        "heads10-0-memory10-True",
        "heads12-33-memory12-False",
        "heads14-0-memory14-True",
    ]
)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("heads", "window", "memory"),
    [
        (Heads(), 0, Memory()),
        (Heads(group=1, dim=80), 0, Memory(block_size=24)),
        (Heads(group=3), 20, Memory(block_size=1)),
        (Heads(group=7, kv_heads=1, dtype=HALF), 0, Memory(block_size=24, units=True)),
        (
            Heads(group=4, dim=64, kv_heads=1, dtype=HALF),
            33,
            Memory(units=True, strided=True, padding=(3, 2)),
        ),
        (Heads(group=2, dtype=HALF), 1, Memory(strided=True)),
        (Heads(group=20, kv_heads=1), 0, Memory(padding=(4, 3))),
        (Heads(group=3, has_sinks=True), 20, Memory(padding=(4, 3))),
        (Heads(group=3, has_sinks=True, cap=0.7), 20, Memory()),
        (Heads(group=2, dtype=HALF, cap=50.0), 0, Memory()),
        (Heads(group=4, kv_heads=1, dtype=HALF, has_sinks=True), 0, Memory()),
        (Heads(group=3, codes="int8"), 0, Memory(units=True)),
        (Heads(dtype=HALF, codes="int8"), 33, Memory(block_size=24)),
        (Heads(group=3, dim=24, codes="fp8"), 20, Memory(block_size=1)),
        (Heads(dim=64, dtype=HALF, codes="fp8", cap=50.0), 0, Memory(units=True, strided=True)),
        (Heads(group=3, dim=24), 20, Memory(units=True, beside=40)),
        (Heads(group=4, dim=320, kv_heads=1, dtype=HALF), 0, Memory(beside=32)),
        (Heads(group=3, dim=48, kv_heads=1, unread=16), 0, Memory(padding=(4, 3))),
        (Heads(group=40, dim=40, kv_heads=1, unread=8, dtype=HALF), 0, Memory(units=True)),
        (Heads(group=4, dim=336, kv_heads=1, unread=48, has_sinks=True), 20, Memory(block_size=24)),
    ],
)
def test_attention_of_mixed_chunks_agrees_with_reference(
    heads: Heads, window: int, memory: Memory, batch_invariant: bool
) -> None:
    seqs = draw(LENGTHS, heads)
    result = attend(small(batch_invariant=batch_invariant), seqs, MIX, heads, window, memory)
    torch.testing.assert_close(
        result,
        reference(seqs, MIX, heads, window, memory),
        atol=TOLERANCE[heads.dtype],
        rtol=TOLERANCE[heads.dtype],
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_decode_agrees_with_dedicated_tile_sizes(dtype: torch.dtype, batch_invariant: bool) -> None:
    heads = Heads(dtype=dtype, kv_heads=1)
    pieces = (Piece(0, 299, 300), Piece(1, 63, 64), Piece(2, 0, 1))
    seqs = draw([300, 64, 1], heads)
    result = attend(
        Attention(batch_invariant=batch_invariant),
        seqs,
        pieces,
        heads,
        memory=Memory(padding=(2, 2)),
    )
    torch.testing.assert_close(
        result, reference(seqs, pieces, heads), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_layers_share_a_plan_and_its_workspace(batch_invariant: bool) -> None:
    heads = Heads(kv_heads=1)
    pieces = (Piece(0, 129, 130), Piece(1, 79, 80))
    q, batch, view = place(draw([130, 80], heads), pieces, heads, 0, Memory())
    attention = small(batch_invariant=batch_invariant)
    plan = attention.plan(batch, 16)
    first, second = (
        attention.attend(q, view, 1, plan, AttentionArgs(heads.scale)) for _ in range(2)
    )
    assert torch.equal(first, second)
    (work,) = next(iter(plan.work.values()))
    items = work.items.items[: int(work.items.count)]
    assert int((items[:, 6] >= 0).sum()) > 2, "no block was shared"
    counters = items[items[:, 6] >= 0, 10]
    assert not work.items.counters[counters].any()


@st.composite
def schedules(draw_: st.DrawFn) -> tuple[list[list[Piece]], Memory, int, int]:
    """Draw chunked schedules of three sequences, block layouts, and shared prefixes."""
    lengths = (75, 40, 18)
    steps: list[list[Piece]] = []
    cuts = [
        [
            0,
            *sorted(draw_(st.sets(st.integers(max(1, length - 12), length - 1), max_size=2))),
            length,
        ]
        for length in lengths
    ]
    pending = [[Piece(seq, *ends) for ends in pairwise(cut)] for seq, cut in enumerate(cuts)]
    while any(pending):
        candidates = [queue for queue in pending if queue]
        taken = draw_(st.lists(st.sampled_from(range(len(candidates))), min_size=1, unique=True))
        steps.append([candidates[index].pop(0) for index in taken])
    memory = Memory(
        draw_(st.sampled_from([1, 16, 24])), draw_(st.booleans()), seed=draw_(st.integers(0, 9))
    )
    return steps, memory, draw_(st.sampled_from([1, 4, 40])), draw_(st.sampled_from([1, 12, 200]))


@cache
def _alone(heads: Heads, window: int) -> tuple[list[Rows3], list[Tensor]]:
    """Return sequences and the rows of each, computed in one chunk without shared blocks."""
    seqs = draw((75, 40, 18), heads)
    attention = small(batch_invariant=True, shared_items=1, row_parts=1)
    pieces = [Piece(seq, 0, len(rows.q)) for seq, rows in enumerate(seqs)]
    return seqs, [attend(attention, seqs, [piece], heads, window) for piece in pieces]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("heads", "window"),
    [
        (Heads(group=3, kv_heads=1), 0),
        (Heads(kv_heads=1, dtype=HALF), 21),
        (Heads(group=2, kv_heads=1, has_sinks=True), 21),
        (Heads(group=2, kv_heads=1, cap=1.5), 0),
        (Heads(kv_heads=1, dtype=HALF, codes="fp8"), 21),
        (Heads(group=34, kv_heads=1, dim=48, unread=16), 0),
    ],
)
@settings(max_examples=at_depth(6), deadline=None)
@given(schedule=schedules())
def test_attention_row_is_bitwise_independent_of_its_batch(
    heads: Heads, window: int, schedule: tuple[list[list[Piece]], Memory, int, int]
) -> None:
    steps, memory, shared_items, row_parts = schedule
    seqs, alone = _alone(heads, window)
    attention = small(batch_invariant=True, shared_items=shared_items, row_parts=row_parts)
    for pieces in steps:
        result = attend(attention, seqs, pieces, heads, window, memory)
        expected = torch.cat([alone[piece.seq][piece.start : piece.end] for piece in pieces])
        assert torch.equal(result, expected), (pieces, memory)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_shared_prefix_has_same_bits_as_unshared(has_sinks: bool) -> None:
    heads = Heads(kv_heads=1, dim=80, has_sinks=has_sinks)
    pieces = [Piece(0, 148, 150), Piece(1, 99, 100)]
    seqs = draw([150, 100], heads)
    results = [
        attend(small(batch_invariant=True, shared_items=items, row_parts=60), seqs, pieces, heads)
        for items in (1, 3, 30)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_batch_of_padding_only_does_no_work() -> None:
    heads = Heads(kv_heads=1)
    q, batch, view = place(draw([5], heads), [Piece(0, 0, 5)], heads, 0, Memory())
    q, batch = padded(q, batch, Memory(padding=(0, 1)))
    batch.cu_seqlens_q.zero_()
    batch.seq_lens.zero_()
    attention = small(batch_invariant=False)
    plan = attention.plan(batch, 16)
    attention.attend(q, view, 1, plan, AttentionArgs(heads.scale))
    assert [int(work.items.count) for works in plan.work.values() for work in works] == [0]


def test_workspace_is_bounded_for_wide_heads() -> None:
    """128 heads of 512 numbers have parts for 512 rows, and usual heads for all."""
    plan = Attention(batch_invariant=True).plan(
        batch_of_rows([Rows([1], 40, [0, 1, 2])], 16), block_size=16
    )
    for shape, expected in (
        (HeadShape(8, 16, 576, 64, torch.bfloat16), 512),
        (HeadShape(8, 4, 128, 0, torch.bfloat16), 2048),
    ):
        (work,) = Attention(batch_invariant=True)._work(plan, shape, torch.device("cpu"))
        assert work.row_parts == expected
        assert work.parts.nbytes <= attention.WORKSPACE


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("memory", "buffers"), [(227 * 1024, 2), (163 * 1024, 2), (99 * 1024, 1)])
def test_wide_heads_have_fewer_buffers_on_a_small_card(
    monkeypatch: pytest.MonkeyPatch, batch_invariant: bool, memory: int, buffers: int
) -> None:
    """An RTX 3090 or 4090 has 99 KiB per program: two buffers for heads of 256 would not fit, or
    they have half of the keys.
    """
    monkeypatch.setattr(attention, "shared_memory", lambda _: memory)
    kernels, device = (
        Attention(batch_invariant=batch_invariant, architecture=80),
        torch.device("cpu"),
    )
    for head_dim, expected in ((256, buffers if batch_invariant else 2), (128, 2)):
        shape = HeadShape(1, 4, head_dim, 0, torch.bfloat16)
        tilings = kernels._tilings(shape, device, single_rows=False)
        assert tilings[0].num_stages == 3 + 2 * (expected - 1)
        assert all(tiling.lanes <= 32 * expected for tiling in tilings)
