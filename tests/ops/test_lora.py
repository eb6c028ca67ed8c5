"""Adapter contributions to a product: the kernels compared with the specification, with one adapter
and with several.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.cpu.backend import CpuOps
from nano_inference.ops.cpu.build import LAWS
from nano_inference.ops.lora import Adapter, LoraPart, Place, placed
from nano_inference.ops.reference import backend as reference
from tests.depth import at_depth
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import available

pytestmark = NEEDS_COMPILER
SIZES = st.sampled_from([1, 3, 15, 16, 17, 48, 64, 65, 130])


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def adapter(
    generator: torch.Generator, width: int, columns: list[int], ranks: list[int]
) -> Adapter:
    """Return an adapter whose parts add to neighbouring columns. A rank of 0 leaves its columns
    unchanged.
    """
    parts: list[LoraPart] = []
    first = 0
    for size, rank in zip(columns, ranks, strict=True):
        if rank:
            a, b = numbers(generator, rank, width), numbers(generator, rank, size)
            parts.append(LoraPart(first, a, b, 0.5 + rank))
        first += size
    return Adapter("own", 1, {"weight": tuple(parts)} if parts else {})


def batch(num_rows: int, adapters: tuple[Adapter, ...], adapter_of: list[int]) -> ForwardBatch:
    rows = batch_of_rows([Rows([0] * num_rows, 0, range(num_rows))], 1)
    return replace(rows, adapters=adapters, row_adapters=torch.tensor(adapter_of))


@pytest.fixture(scope="module", params=LAWS)
def backends(request: pytest.FixtureRequest) -> list[CpuOps]:
    """Return the backends of one law, best instruction set first."""
    names = available(request.param)
    return [*(CpuOps(1, name) for name in names), CpuOps(2, names[0])]


@settings(max_examples=at_depth(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    width=SIZES,
    columns=st.lists(SIZES, min_size=1, max_size=3),
    num_rows=st.sampled_from([1, 2, 5, 70]),
    data=st.data(),
)
def test_row_gets_the_sum_of_its_own_adapter(
    backends: list[CpuOps],
    seed: int,
    dtype: torch.dtype,
    width: int,
    columns: list[int],
    num_rows: int,
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ranks = st.lists(
        st.sampled_from([0, 1, 3, 4, 8, 17]), min_size=len(columns), max_size=len(columns)
    )
    adapters = tuple(adapter(generator, width, columns, data.draw(ranks)) for _ in range(3))
    adapter_of = data.draw(st.lists(st.integers(-1, 2), min_size=num_rows, max_size=num_rows))
    x, y = numbers(generator, num_rows, width).to(dtype), numbers(generator, num_rows, sum(columns))
    rows = batch(num_rows, adapters, adapter_of)
    sums = [ops.lora(y, x, "weight", rows) for ops in backends]
    assert all(torch.equal(each, sums[0]) for each in sums)  # on any set and thread count
    expected = reference.lora(y, x, "weight", rows)
    assert (sums[0] - expected).abs().max() < 2e-6 * 20 * width * 17
    for row in range(min(num_rows, 5)):
        alone = batch(1, (adapters[max(adapter_of[row], 0)],), [min(adapter_of[row], 0)])
        single = (y[row : row + 1], x[row : row + 1], "weight", alone)
        assert torch.equal(backends[0].lora(*single), sums[0][row : row + 1])
        assert torch.equal(reference.lora(*single), expected[row : row + 1])
        if adapter_of[row] < 0 or "weight" not in adapters[adapter_of[row]].parts:
            assert torch.equal(sums[0][row], y[row])


def test_lora_sum_equals_the_product_of_its_matrices(backends: list[CpuOps]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = adapter(generator, 64, [32, 16], [4, 8])
    x, y = numbers(generator, 3, 64), numbers(generator, 3, 48)
    expected = y.double()
    for first, a, b, scale in matrices.parts["weight"]:
        expected[:, first : first + b.shape[1]] += x.double() @ a.double().T * scale @ b.double()
    rows = batch(3, (matrices,), [0, 0, 0])
    for actual in (backends[0].lora(y, x, "weight", rows), reference.lora(y, x, "weight", rows)):
        assert (actual - expected).abs().max() < 1e-3


def test_row_with_unknown_adapter_is_rejected(backends: list[CpuOps]) -> None:
    matrices = adapter(torch.Generator().manual_seed(0), 16, [16], [4])
    with pytest.raises(ValueError, match="a row names an adapter that the step does not have"):
        backends[0].lora(
            torch.zeros(1, 16), torch.zeros(1, 16), "weight", batch(1, (matrices,), [1])
        )


@settings(max_examples=at_depth(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**20),
    shapes=st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    wrong=st.sampled_from([None, torch.nan, torch.inf, -torch.inf]),
    data=st.data(),
)
def test_matrices_are_placed_bit_for_bit(
    backends: list[CpuOps],
    seed: int,
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    wrong: float | None,
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sources = [numbers(generator, *shape).to(dtype) for shape in shapes]
    for tensor in sources:
        tensor.view(-1)[0] = 1e-40  # denormal in float32
    if data.draw(st.booleans()):
        sources[-1] = sources[-1].T.contiguous().T
    places = st.lists(st.integers(0, len(sources) - 1), max_size=2)
    faults = [] if wrong is None else data.draw(places)
    for fault in faults:
        at = data.draw(st.integers(0, sources[fault].numel() - 1))
        sources[fault][at // shapes[fault][1], at % shapes[fault][1]] = wrong
    turned = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    offset = data.draw(st.integers(0, 1))  # aligned data bypasses the caches
    for write_into in (placed, *(each.placed for each in backends)):
        outs = [
            torch.zeros(2 + rows * columns)[offset : offset + rows * columns].view(
                (columns, rows) if turn else (rows, columns)
            )
            for (rows, columns), turn in zip(shapes, turned, strict=True)
        ]
        write = write_into([Place(out, turn) for out, turn in zip(outs, turned, strict=True)])
        assert write(sources) == min(faults, default=-1)
        for out, turn, source in zip(outs, turned, sources, strict=True):
            expected = (source.T if turn else source).float().contiguous()
            assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
            assert out.untyped_storage()[4 * (offset + out.numel())] == 0
