"""Products of 8-bit weights in Triton have the bits of the definition, for any tile and any other
rows.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.formats import FORMATS, FP8, Format
from nano_inference.ops.moe import Biases, Experts
from nano_inference.ops.quantised import product, quantise_rows
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.settings import Routing
from tests.depth import at_depth

pytest.importorskip("triton")

from nano_inference.ops.cuda import matmul, moe, quantised
from nano_inference.ops.cuda.backend import CudaOps
from nano_inference.ops.cuda.matmul import invariant_product
from nano_inference.ops.cuda.quantised import (
    AlignedWeight,
    Tile,
    quantised_product,
    quantised_rows,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SEGMENTS: dict[int, tuple[int, ...] | None] = {
    5: None,
    33: None,
    72: (0, 32, 64, 64, 72),
    96: (0, 12, 48, 60, 96),
    192: (0, 24, 48, 72, 96, 120, 144, 168, 192),
    300: (0, 300),
}
TILES = [Tile(16, 16, 32, 4, 2), Tile(32, 16, 64, 4, 2)]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of very different magnitudes, one of them zero."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sizes = 10.0 ** (torch.arange(shape[0]) % 5 - 2)
    sizes[shape[0] // 2] = 0
    return (rows * sizes[:, None]).to(DEVICE, dtype)


def allocate(shape: Any, dtype: torch.dtype, form: Format, segments: Any = None) -> AlignedWeight:
    return AlignedWeight(shape, dtype, DEVICE, form, segments)


def stored(rows: int, columns: int, seed: int, dtype: torch.dtype) -> AlignedWeight:
    weight = allocate((rows, columns), dtype, FORMATS["int8"], SEGMENTS[columns])
    weight.write(0, drawn(rows, columns, seed=seed))
    return weight


@pytest.mark.thorough
@settings(deadline=None, max_examples=at_depth(24))
@given(
    columns=st.sampled_from(sorted(SEGMENTS)),
    rows=st.integers(1, 70),
    count=st.sampled_from([0, 1, 3, 16, 17, 40]),
    dtype=st.sampled_from(DTYPES),
    given_dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    tile=st.sampled_from([None, *TILES]),
    seed=st.integers(0, 99),
)
def test_products_have_the_bits_of_the_definition(
    columns: int,
    rows: int,
    count: int,
    dtype: torch.dtype,
    given_dtype: torch.dtype,
    has_bias: bool,
    tile: Tile | None,
    seed: int,
) -> None:
    weight, x = stored(rows, columns, seed, dtype), drawn(max(count, 1), columns, seed=seed + 1)
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        given_dtype = dtype  # the interpreter does not round to it as a card does
    x = x.to(given_dtype)[:count]
    bias = drawn(rows, 1, seed=seed + 2)[:, 0] if has_bias else None
    with pytest.MonkeyPatch.context() as patch:
        if tile is not None:
            patch.setattr(quantised, "tile_of", lambda *_: tile)
        result = quantised_product(x, weight, bias)
    assert (result.dtype, result.shape) == (torch.float32, (count, rows))
    if count:
        assert torch.equal(result, reference.linear(x, weight, bias))


@settings(deadline=None, max_examples=at_depth(20))
@given(
    columns=st.sampled_from(sorted(SEGMENTS)),
    dtype=st.sampled_from(DTYPES),
    bad=st.sampled_from([torch.inf, -torch.inf, torch.nan]),
    seed=st.integers(0, 99),
)
def test_rows_are_rounded_as_defined(
    columns: int, dtype: torch.dtype, bad: float, seed: int
) -> None:
    weight, x = stored(1, columns, 0, dtype), drawn(4, columns, seed=seed, dtype=dtype)
    x[1, seed % columns] = bad
    codes, scales = quantised_rows(x, weight)
    expected = quantise_rows(x, weight.codes().groups)
    assert torch.equal(codes[:, :columns].float(), expected[0])
    assert torch.equal(scales.isnan(), expected[1].isnan())  # bits of a NaN have no meaning
    assert torch.equal(scales.nan_to_num(7), expected[1].nan_to_num(7))


def test_extreme_codes_do_not_overflow() -> None:
    """Sums of products of the largest codes need all digits of float32 and more."""
    weight = allocate((3, 300), torch.float32, FORMATS["int8"])
    weight.write(0, torch.full((3, 300), -2.0, device=DEVICE))
    x = torch.full((2, 300), 3.0, device=DEVICE)
    x[1, 7] = 2.9
    assert torch.equal(quantised_product(x, weight), product(x, weight.codes()))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_operations_take_quantised_weights(batch_invariant: bool) -> None:
    ops, weight = CudaOps(batch_invariant=batch_invariant), stored(40, 96, 3, torch.float16)
    whole = allocate((40, 96), torch.float16, FORMATS["int8"])
    whole.write(0, drawn(40, 96, seed=5))
    x = drawn(3, 96, seed=4, dtype=torch.float16)
    ids = torch.tensor([39, 0, 7], device=DEVICE)
    assert torch.equal(ops.linear(x, weight), reference.linear(x, weight))
    assert torch.equal(ops.linear(x, weight, None, (0, 48, 96)), reference.linear(x, weight))
    assert torch.equal(ops.logits(x, whole), reference.logits(x, whole))
    assert torch.equal(ops.embed(ids, whole, 1.5), reference.embed(ids, whole, 1.5))
    some = ops.embed(ids, whole, 1.5, (7, 60))
    assert torch.equal(some, reference.embed(ids, whole, 1.5, (7, 60)))
    assert bool((some[1] == 0).all())


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_experts_agree_with_the_reference(activation: str) -> None:
    """A row through an expert has the same bits among other rows. The reference's exponentials
    differ in the last bit, so a code of an inner number may differ by one.
    """
    count, hidden, inner, dtype = 5, 48, 64, torch.float16
    router = torch.zeros(count, hidden, device=DEVICE)
    weights: list[Any] = []
    for seed, (rows, columns) in enumerate(((2 * inner, hidden), (hidden, inner))):
        size = (count * rows, columns)
        weights.append(allocate(size, dtype, FORMATS["int8"]))
        weights[-1].write(0, drawn(*size, seed=seed).clamp(-3, 3))
    biases = Biases(
        torch.zeros(count, device=DEVICE),
        *(drawn(count * n, 1, seed=9)[:, 0].to(dtype) / 9 for n in (2 * inner, hidden)),
    )
    routing = Routing(2, True)
    gate_up, down = weights
    experts = Experts(router, gate_up, down, count, routing, activation, biases=biases)
    x = drawn(7, hidden, seed=3, dtype=dtype).clamp(-3, 3)
    rows = torch.arange(7, device=DEVICE).repeat_interleave(2)
    held = torch.tensor([0, 3, 3, 1, 4, 3, 0, 1, 3, 4, 3, 0, 4, 1], device=DEVICE)
    result = moe.products(x, rows, held, experts)
    expected = reference.products(x, rows, held, experts)
    assert float((result - expected).norm() / expected.norm()) < 1e-3
    some = torch.tensor([8, 2, 13], device=DEVICE)
    assert torch.equal(moe.products(x, rows[some], held[some], experts), result[some])


@pytest.mark.thorough
@settings(deadline=None, max_examples=at_depth(20))
@given(
    columns=st.sampled_from([5, 64, 300]),
    rows=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES[: 3 if DEVICE.type == "cuda" else 2]),
    segments=st.sampled_from([((32, 512),), ((4, 32),)]),
    capability=st.sampled_from([80, 90]),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fp8_products_agree_with_the_reference(
    columns: int,
    rows: int,
    dtype: torch.dtype,
    segments: tuple[tuple[int, int], ...],
    capability: int,
    has_bias: bool,
    seed: int,
) -> None:
    """Cards without instructions for e4m3 compute the same bits. So does a row in any batch."""
    weight, x = allocate((rows, columns), dtype, FP8), drawn(70, columns, seed=seed + 1)
    weight.write(0, drawn(rows, columns, seed=seed))
    x = x.to(dtype)
    bias = drawn(rows, 1, seed=seed + 2)[:, 0].to(dtype) if has_bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "SEGMENTED", segments)
        result = invariant_product(x, weight, bias, torch.float32)
        patch.setattr(matmul, "capability_of", lambda _: capability)
        few = slice(seed % 60, seed % 60 + 1 + seed % 9)
        part = invariant_product(x[few], weight, bias, torch.float32)
    assert torch.equal(part, result[few])
    numbers = weight.codes().numbers().double()
    terms = x.double().abs() @ numbers.abs().T + (0 if bias is None else bias.double().abs())
    assert bool(((result - reference.linear(x, weight, bias)).abs() <= terms * 1e-6).all())


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_operations_take_fp8_weights(batch_invariant: bool) -> None:
    ops, weight = CudaOps(batch_invariant=batch_invariant), allocate((40, 96), torch.float16, FP8)
    weight.write(0, drawn(40, 96, seed=5))
    x = drawn(3, 96, seed=4, dtype=torch.float16)
    ids = torch.tensor([39, 0, 7], device=DEVICE)
    assert ops.linear(x, weight).dtype == torch.float32
    torch.testing.assert_close(ops.linear(x, weight), reference.linear(x, weight))
    torch.testing.assert_close(ops.logits(x, weight), reference.logits(x, weight))
    assert torch.equal(ops.embed(ids, weight, 1.5), reference.embed(ids, weight, 1.5))
