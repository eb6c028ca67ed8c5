"""CUDA kernels of layers with a state, in Triton's interpreter: close to the reference, and the same
bits for any chunks, units and padding.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from nano_inference.device.state_tensors import StateStorage
from nano_inference.device.units import UnitMap
from nano_inference.kv_cache.block_pool import Block
from nano_inference.kv_cache.sliding_window import BlockLayout, UnitPool
from nano_inference.models.spec.states import DeltaNet, ShortConv, StateSpec
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.reference import state as reference
from tests.ops.state_cases import (
    CONV,
    DELTA,
    SIZE,
    TABLES,
    TILES,
    UNEVEN,
    Cuts,
    Texts,
    computed,
    numbers,
    storage,
)

pytest.importorskip("triton")

from nano_inference.ops.cuda.backend import CudaOps

OPS = CudaOps(batch_invariant=True)
JUNK = -1_000_000_000
WIDE = ShortConv((True,), 700, 4)
# each interpreted program takes milliseconds: two heads, whose values are two slices
FEW = DeltaNet((True,), 1, 2, 16, 48, 4)
SPECS = {"conv": CONV, "delta": FEW}
SHORT = Texts(lengths=(27, 11))
CUTS: tuple[Cuts, ...] = (((1, 2, 8, 9, 19), (4,)), ((13, 14, 15, 16, 17, 26), ()), ((7, 24), ()))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
CASES: dict[str, tuple[StateSpec, torch.dtype, int]] = {
    "conv": (CONV, FLOAT32, SIZE),
    "conv-wide": (WIDE, FLOAT32, SIZE),
    "conv-12": (CONV, FLOAT32, 12),
    "conv-bfloat16": (CONV, BFLOAT16, 16),
    "conv-float16": (CONV, FLOAT16, 16),
    "delta": (DELTA, FLOAT32, SIZE),
    "tiles": (TILES, FLOAT32, SIZE),
    "uneven": (UNEVEN, FLOAT32, SIZE),
    "delta-12": (DELTA, FLOAT32, 12),
    "delta-32": (DELTA, FLOAT32, 32),
    "delta-bfloat16": (DELTA, BFLOAT16, 16),
    "delta-float16": (DELTA, FLOAT16, 16),
}


@pytest.mark.thorough(cases=[name for name in CASES if "conv" not in name and name != "uneven"])
@pytest.mark.parametrize("case", CASES)
def test_state_kernels_agree_with_the_reference(case: str) -> None:
    """Compare results and everything that is stored, from rows of the model's dtype."""
    spec, dtype, size = CASES[case]
    texts = SHORT._replace(size=size)
    views = [storage(spec, dtype, texts) for _ in range(2)]
    results = [
        computed(
            *(spec, dtype, states),
            texts=texts,
            view=view,
            change=lambda batch, rows: (batch, rows.to(dtype)),
        )[0]
        for states, view in zip((OPS, reference), views, strict=True)
    ]
    near: dict[str, Any] = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "equal_nan": True}
    for rows, expected in zip(*results, strict=True):
        torch.testing.assert_close(rows, expected, **near)
    for name, column in views[0].tensors.items():
        torch.testing.assert_close(column, views[1].tensors[name], **near)


@pytest.mark.thorough(cases=["delta-dtype0", "delta-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_state_bits_do_not_depend_on_chunks(name: str, dtype: torch.dtype) -> None:
    """In bfloat16, inputs of earlier rows are rounded, in the batch as in the cache."""
    spec = SPECS[name]
    whole, kept = computed(spec, dtype, OPS, texts=SHORT)
    for cuts in CUTS:
        got, memory = computed(spec, dtype, OPS, cuts, SHORT)
        assert same([*got, *memory], [*whole, *kept])


@pytest.mark.thorough
def test_heads_in_tiles_have_the_same_bits() -> None:
    (plain, kept), (in_tiles, kept_too) = (
        computed(spec, torch.float32, OPS, texts=SHORT) for spec in (DELTA, TILES)
    )
    heads = [rows.unflatten(1, (4, 48))[:, [0, 2, 1, 3]].flatten(1) for rows in plain]
    assert same([*in_tiles, *kept_too], [*heads, *kept])


def units_of(spec: StateSpec) -> UnitMap:
    """Return units of the ten blocks in another order, and five that back no block."""
    pool = UnitPool(15, 10, BlockLayout(0, 1, spec.window(SIZE), beside=True))
    pool.free = [4, 9, 2, 14, 7, 0, 11, 5, 13, 1, 3, 6, 8, 10, 12]
    for block in range(10):
        pool.assign(Block(block))
    return UnitMap(pool, torch.device("cpu"))


def captured(batch: ForwardBatch, rows: Tensor) -> tuple[ForwardBatch, Tensor]:
    """Return a step as a graph computes it: with padding, and a stride that the device knows."""
    count, (lines, columns) = len(rows), batch.block_tables.shape
    wide = torch.full((lines + 2, columns + 3), JUNK)
    wide[:lines, :columns] = batch.block_tables
    batch = replace(
        batch,
        positions=pad(batch.positions, (0, 3)),
        slot_mapping=pad(batch.slot_mapping, (0, 3), value=-1),
        row_chunks=batch.row_chunks[:0],  # no kernel reads it
        cu_seqlens_q=pad(batch.cu_seqlens_q, (0, 2), value=count),
        seq_lens=pad(batch.seq_lens, (0, 2)),
        block_tables=wide.flatten()[: lines + 2].view(lines + 2, 1),
        table_stride=torch.tensor([columns + 3]),
    )
    return batch, torch.cat([rows, torch.full((3, rows.shape[1]), torch.nan)])


@pytest.mark.thorough(cases=["delta"])
@pytest.mark.parametrize("name", SPECS)
def test_states_in_units_and_captured_steps_have_the_same_bits(name: str) -> None:
    spec, cuts = SPECS[name], CUTS[2]
    expected, _ = computed(spec, torch.float32, OPS, cuts, SHORT)
    units = units_of(spec)
    view = storage(spec, torch.float32, units=units)
    got, _ = computed(spec, torch.float32, OPS, cuts, SHORT, view=view, change=captured)
    assert same(got, expected)
    unused = sorted(set(range(15)) - set(units.units()[0].tolist()))
    assert all(bool(each[:, unused].isnan().all()) for each in view.tensors.values())


@pytest.mark.thorough(cases=["delta"])
@pytest.mark.parametrize("name", SPECS)
def test_state_kernels_read_only_the_window(name: str) -> None:
    """Memory outside the window may be reused: the scheduler frees it."""
    spec = SPECS[name]
    whole, _ = computed(spec, torch.float32, OPS, texts=SHORT)
    projected, weights = numbers(spec, torch.float32, SHORT)
    operation = OPS.delta_net if isinstance(spec, DeltaNet) else OPS.short_conv
    view: StateStorage = storage(spec, torch.float32)
    for position in range(SHORT.lengths[0]):
        behind = max(0, position - spec.window(SIZE) + 1) // SIZE
        for tensor in view.tensors.values():
            tensor[:, list(TABLES[0][:behind])] = torch.nan
        batch = batch_of_rows([Rows([0], position, TABLES[0])], SIZE)
        row = operation(projected[position : position + 1], weights, batch, view, 0)
        assert torch.equal(row[0], whole[0][position])


@pytest.mark.thorough
def test_wrong_draft_leaves_no_trace() -> None:
    """Rows that are computed again overwrite what wrong ones have stored, also at a block's end."""
    projected, weights = numbers(FEW, torch.float32, SHORT)
    length = SHORT.lengths[0]
    views = [storage(FEW, torch.float32) for _ in range(2)]
    expected, _ = computed(FEW, torch.float32, OPS, texts=SHORT, view=views[0])
    wrong = projected[:length].flip(0).contiguous()
    for start, end in ((0, 5), (5, 22), (22, length)):
        draft = min(end + 9, length)
        for rows in (wrong[start:draft], projected[start:end]):
            batch = batch_of_rows([Rows([0] * len(rows), start, TABLES[0])], SIZE)
            out = OPS.delta_net(rows, weights, batch, views[1], 0)
        assert torch.equal(out, expected[0][start:end])
    for name, column in views[0].tensors.items():
        kept, other = (each[:, list(TABLES[0])] for each in (column, views[1].tensors[name]))
        assert torch.equal(kept.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sigmoid_gate_agrees_with_the_reference(dtype: torch.dtype) -> None:
    """The gate is a part of wider rows, of the same or another dtype."""
    torch.manual_seed(0)
    x = torch.randn(5, 600).to(dtype)
    for gate in (torch.randn(5, 1300) * 30, torch.randn(5, 1300).to(dtype)):
        got = OPS.sigmoid_gate(x, gate[:, 600:1200])
        expected = reference.sigmoid_gate(x, gate[:, 600:1200])
        rtol = 1e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-6)
