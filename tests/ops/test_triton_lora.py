"""Adapters on the CUDA backend in Triton's interpreter: sums against the specification, groupings,
and the law.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.cuda import lora as kernels
from nano_inference.ops.cuda.backend import cuda_ops
from nano_inference.ops.cuda.lora import GroupedLora, LoraBounds, Unnamed, _grouped, bounds_of
from nano_inference.ops.lora import Adapter, LoraPart
from nano_inference.ops.reference import backend as reference
from tests.depth import at_depth

ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SIZES = st.sampled_from([16, 17, 48, 130])
RANKS = st.sampled_from([0, 1, 3, 16, 17, 40])


@pytest.fixture(scope="module", autouse=True)
def several_of_each() -> Iterator[None]:
    """Use segments and blocks so small that a few numbers span several."""
    with patch.multiple(kernels, LEAST_SEGMENT=32, DEPTH=32, COLUMNS=32, SPLIT_ROWS=20, BLOCK=16):
        yield


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adapter(seed: int, width: int, columns: list[int], ranks: list[int]) -> Adapter:
    """Return an adapter with parts side by side. A rank of 0 leaves its columns unchanged."""
    parts: list[LoraPart] = []
    first = 0
    for index, (size, rank) in enumerate(zip(columns, ranks, strict=True)):
        if rank:
            a, b = numbers(seed + index, rank, width), numbers(seed - index, rank, size)
            parts.append(LoraPart(first, a, b, 0.5 + rank / 8))
        first += size
    return Adapter(f"adapter {seed}", 1, {"weight": tuple(parts)} if parts else {})


def rows_with(adapters: tuple[Adapter, ...], adapter_of: list[int]) -> ForwardBatch:
    rows = batch_of_rows([Rows([0] * len(adapter_of), 0, range(len(adapter_of)))], 1)
    return replace(rows, adapters=adapters, row_adapters=torch.tensor(adapter_of))


class Case(NamedTuple):
    """Products and the adapters of their rows."""

    y: Tensor
    x: Tensor
    adapters: tuple[Adapter, ...]
    adapter_of: list[int]

    def rows(self, *kept: int) -> "Case":
        """Return some of the rows."""
        adapter_of = [self.adapter_of[row] for row in kept]
        return Case(self.y[list(kept)], self.x[list(kept)], self.adapters, adapter_of)

    def batch(self) -> ForwardBatch:
        return rows_with(self.adapters, self.adapter_of)

    def added(self, ops: GroupedLora | None = None) -> Tensor:
        ops = ops or GroupedLora()
        return ops.lora(self.y.clone(), self.x, "weight", self.batch())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    seed, width = draw(st.integers(1, 2**20)), draw(SIZES)
    columns = draw(st.lists(SIZES, min_size=1, max_size=3))
    num_rows = draw(st.sampled_from([1, 2, 5, 19, 37]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    adapters = tuple(
        adapter(seed + 10 * index, width, columns, [draw(RANKS) for _ in columns])
        for index in range(draw(st.integers(1, 4)))
    )
    of = st.integers(-1, len(adapters) - 1)
    adapter_of = draw(st.lists(of, min_size=num_rows, max_size=num_rows))
    y, x = numbers(seed, num_rows, sum(columns)), numbers(seed + 1, num_rows, width)
    return Case(y.to(dtype), x.to(dtype), adapters, adapter_of)


@settings(max_examples=at_depth(25))
@given(case=cases())
def test_sums_agree_with_the_specification(case: Case) -> None:
    added = case.added()
    expected = reference.lora(case.y, case.x, "weight", case.batch())
    assert added.dtype == expected.dtype
    size = sum(
        float(part.b.abs().max() * part.a.abs().max() * part.scale * len(part.a))
        for adapter in case.adapters
        for parts in adapter.parts.values()
        for part in parts
    )
    tolerance = ULP[added.dtype] * expected.float().abs() + 2e-6 * size * case.x.shape[1]
    assert bool(((added.float() - expected.float()).abs() <= tolerance).all())


@settings(max_examples=at_depth(25))
@given(case=cases(), data=st.data())
def test_row_bits_depend_on_its_own_adapter_only(case: Case, data: st.DataObject) -> None:
    together = case.added()
    for row, index in enumerate(case.adapter_of):
        if index < 0 or "weight" not in case.adapters[index].parts:
            assert torch.equal(together[row], case.y[row])
    order = data.draw(st.permutations(range(len(case.adapter_of))))
    kept = order[: data.draw(st.integers(1, len(order)))]
    assert torch.equal(case.rows(*kept).added(), together[kept])
    (one,) = kept[:1]
    named = case.adapters[max(case.adapter_of[one], 0)]
    alone = case.rows(one)._replace(adapters=(named,), adapter_of=[min(case.adapter_of[one], 0)])
    assert torch.equal(alone.added()[0], together[one])


def test_row_bits_ignore_neighbors_in_segments() -> None:
    """Cover sums over several segments, which few random cases have."""
    case = Case(numbers(2, 5, 48), numbers(3, 5, 130), (adapter(1, 130, [48], [16]),), [0] * 5)
    together = case.added()
    for row in range(5):
        assert torch.equal(case.rows(row).added()[0], together[row])


@settings(max_examples=at_depth(40))
@given(addresses=st.lists(st.sampled_from([0, 0, 2**33, 7, 2**45 + 16]), min_size=1, max_size=90))
def test_groups_hold_each_adapted_row_once(addresses: list[int]) -> None:
    bounds = LoraBounds(1, 16, True)
    groups = _grouped(torch.tensor(addresses), len(addresses), bounds, None)
    seen: list[int] = []
    tiles = int(groups.num_tiles)
    for tile in range(tiles):
        count = int(groups.counts[tile])
        assert 0 < count <= kernels.ROWS
        start = tile * kernels.ROWS
        rows = groups.order[start : start + count].tolist()
        assert {addresses[row] for row in rows} == {int(groups.tables[tile])}
        seen += rows
    assert sorted(seen) == [row for row, address in enumerate(addresses) if address]
    sizes = [addresses.count(address) for address in {*addresses} - {0}]
    assert tiles == sum(-(-size // kernels.ROWS) for size in sizes)


def test_addresses_name_adapters_that_no_capture_knew() -> None:
    """A captured step reads addresses, so an adapter that is made later needs no new capture."""
    ops, width, columns = GroupedLora(), 48, [32, 16]
    x, y = numbers(1, 6, width), numbers(2, 6, 48)
    addresses = torch.zeros(6, dtype=torch.int64)
    unnamed = Unnamed(LoraBounds(parts=2, rank=40, aligned=True))
    captured = replace(rows_with((), [0] * 6), adapters=(unnamed,), row_adapters=addresses)

    def replayed() -> Tensor:
        batch = ops.group(captured)
        other = ops.lora(torch.zeros(6, 16), x, "a product that is seen first", batch)
        assert not other.any()
        return ops.lora(y.clone(), x, "weight", batch)

    assert torch.equal(replayed(), y)
    first, second = adapter(3, width, columns, [4, 40]), adapter(4, width, columns, [0, 17])
    for adapters, adapter_of in (((first,), [0, -1] * 3), ((second, first), [1, 0, 0, -1, 1, 1])):
        by_index = torch.tensor([*ops.addresses(adapters).tolist(), 0])
        addresses.copy_(by_index[torch.tensor(adapter_of)])
        assert torch.equal(replayed(), Case(y, x, adapters, adapter_of).added())


def test_bounds_cover_the_parts() -> None:
    one, other = adapter(1, 16, [32, 16], [4, 20]), adapter(2, 16, [32, 17], [3, 3])
    assert bounds_of(one.parts.values()) == LoraBounds(2, 20, True)
    assert bounds_of(one.parts.values()).ranks == 32
    assert bounds_of(other.parts.values()) == LoraBounds(2, 3, False)


def test_segments_depend_on_the_depth_only() -> None:
    with patch.multiple(kernels, LEAST_SEGMENT=512, DEPTH=64):
        assert {depth: kernels.segment_of(depth) for depth in (64, 1000, 1024, 4096, 14_336)} == {
            64: 64,
            1000: 1024,
            1024: 512,
            4096: 512,
            14_336: 1792,
        }


def test_backend_has_adapters() -> None:
    for batch_invariant in (False, True):
        ops = cuda_ops(batch_invariant=batch_invariant)
        assert ops.has_adapters
        assert ops.step_adapters is not None
