"""The product with independent rows, in Triton's interpreter: a row has the same bits in any batch.

bfloat16 is left out because the interpreter multiplies it wrongly. tests/gpu tests the compiled
kernels in bfloat16.
"""

from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.cuda import matmul
from tests.depth import at_depth

# Rows and columns of a weight: one segment, several, whole and ragged tiles, a shorter last
# segment.
SHAPES = [(100, 96), (128, 1024), (70, 1030), (130, 900)]
PATHS = {"one after another": 0, "in programs of their own": 10**6}


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers with NaN before and after them in memory."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    around = torch.full((values.numel() + 512,), torch.nan, dtype=dtype)
    around[256:-256] = values.flatten()
    return around[256:-256].view(shape)


@pytest.fixture(scope="module", autouse=True)
def short_segments() -> Iterator[None]:
    with patch.object(matmul, "SEGMENTED", ((32, 200),)):
        yield


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    with patch.object(matmul, "MOST_SPLIT_TILES", PATHS[request.param]):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("path")
def test_invariant_product_agrees_with_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = drawn(*shape, seed=1, dtype=dtype), drawn(shape[0], seed=2, dtype=dtype)
    x = drawn(70, shape[1], seed=3, dtype=dtype)
    expected = x.double() @ weight.double().t()
    got = matmul.invariant_product(x, weight, None, torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-4)
    with_bias = matmul.invariant_product(x, weight, bias, dtype)
    assert torch.equal(with_bias, (got + bias.float()).to(dtype)), (
        "the bias was added after the rounding"
    )


@cache
def of_200_rows(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    weight, x = drawn(*shape, seed=1, dtype=dtype), drawn(200, shape[1], seed=3, dtype=dtype)
    with patch.object(matmul, "MOST_SPLIT_TILES", 0):
        return matmul.invariant_product(x, weight, None, torch.float32)


@pytest.mark.thorough
@settings(max_examples=at_depth(16), deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    num_rows=st.integers(1, 200),
    first=st.integers(0, 199),
    most_split_tiles=st.sampled_from([0, 2, 48]),
)
def test_product_row_is_bitwise_independent_of_its_batch(
    shape: tuple[int, int], dtype: torch.dtype, num_rows: int, first: int, most_split_tiles: int
) -> None:
    """Compare with 200 rows, any batch size, any position, and both ways to compute segments."""
    weight, x = drawn(*shape, seed=1, dtype=dtype), drawn(200, shape[1], seed=3, dtype=dtype)
    every = of_200_rows(shape, dtype)
    places = (torch.arange(num_rows) * 7 + first) % 200
    with patch.object(matmul, "MOST_SPLIT_TILES", most_split_tiles):
        some = matmul.invariant_product(x[places], weight, None, torch.float32)
    assert torch.equal(some, every[places])


def test_product_row_ignores_contents_of_other_rows() -> None:
    weight, x = (
        drawn(128, 512, seed=1, dtype=torch.float32),
        drawn(20, 512, seed=3, dtype=torch.float32),
    )
    expected = matmul.invariant_product(x, weight, None, torch.float32)
    x[1::2] = torch.nan
    got = matmul.invariant_product(x, weight, None, torch.float32)
    assert torch.equal(got[::2], expected[::2])
    assert got[1::2].isnan().all()


@given(
    num_columns=st.integers(1, 200_000),
    depth=st.integers(1, 20_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_segments_cover_the_weight(num_columns: int, depth: int, dtype: torch.dtype) -> None:
    cut = matmul.tiling(num_columns, depth, dtype)
    assert cut.segment % cut.depth == 0
    assert (cut.num_segments - 1) * cut.segment < depth <= cut.num_segments * cut.segment
    assert cut.num_segments <= matmul.MOST_SEGMENTS


def test_product_handles_unusual_layouts_and_dtypes() -> None:
    """Cover zero rows, non-contiguous rows, another dtype, and a weight that is a slice."""
    weight = drawn(40, 64, seed=1, dtype=torch.float32)
    x = drawn(64, 6, seed=3, dtype=torch.float32).t()
    assert matmul.invariant_product(x[:0], weight, None, torch.float32).shape == (0, 40)
    assert matmul.invariant_product(x, weight[:0], None, torch.float32).shape == (6, 0)
    got = matmul.invariant_product(x[:, :32].double(), weight[:, :32], None, torch.float32)
    expected = matmul.invariant_product(
        x[:, :32].contiguous(), weight[:, :32].contiguous(), None, torch.float32
    )
    assert torch.equal(got, expected)


def test_float32_products_ignore_the_tf32_setting() -> None:
    """The kernels do not call the vendor's library, so its TF32 setting has no effect. This machine
    has no such device.
    """
    on_cuda = patch.object(Tensor, "is_cuda", new=True)
    weight, x = (
        drawn(40, 64, seed=1, dtype=torch.float32),
        drawn(6, 64, seed=3, dtype=torch.float32),
    )
    product = matmul.invariant_product(x, weight, None, torch.float32)
    before = torch.backends.cuda.matmul.fp32_precision
    with on_cuda, patch.object(matmul, "invariant_product", return_value=product) as called:
        assert matmul.product(x, weight) is not product
        try:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            assert matmul.product(x, weight) is product
            assert matmul.product_float32(x, weight) is product
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
        assert matmul.product_float32(x, weight) is not product
        assert called.call_count == 2
