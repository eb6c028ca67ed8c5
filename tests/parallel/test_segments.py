"""Sums in eight segments: bounds, the tree, products by both backends, and embeddings of a
vocabulary shard.
"""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.cpu.backend import CpuOps
from nano_inference.ops.cpu.build import LAWS, Law
from nano_inference.ops.reference import backend as reference
from nano_inference.parallel.bounds import SEGMENTS, check_segments, row_segments, segment_unit
from nano_inference.parallel.segments import tree_sum
from tests.depth import at_depth
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import as_packed, available
from tests.parallel.test_tensor_parallel import on_ranks
from tests.parallel.thread_group import ThreadGroup

FEW = settings(max_examples=at_depth(25), deadline=None)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
heights = st.sampled_from([1, 2, 3, 4, 5, 8, 17, 64, 65])
widths = st.sampled_from([1, 16, 17, 33, 96, 130])


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def bounds(draw: st.DrawFn) -> tuple[int, ...]:
    """Generate bounds of 1, 2, 4 or 8 segments, some of them empty, at even columns."""
    columns, count = (
        draw(st.sampled_from([1, 7, 16, 48, 100, 257, 576])),
        draw(st.sampled_from([1, 2, 4, 8])),
    )
    inner = sorted(2 * draw(st.integers(0, columns // 2)) for _ in range(count - 1))
    return (0, *inner, columns)


@given(st.integers(1, 5000), st.sampled_from([2, 16, 32, 64, 128]))
def test_segments_cover_all_columns(columns: int, unit: int) -> None:
    for segments in (row_segments(columns, unit), row_segments(columns, segment_unit(columns))):
        check_segments(segments, columns)
        assert len(segments) == SEGMENTS + 1
        assert all(bound % 2 == 0 for bound in segments[:-1])
    units = -(-columns // unit)
    sizes = [-(-(end - first) // unit) for first, end in pairwise(row_segments(columns, unit))]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == units


@pytest.mark.parametrize(
    "wrong", [(0, 4), (1, 8), (0, 5, 4, 6, 8), (0, 2, 4, 8), (0,), (), tuple(range(17))]
)
def test_invalid_bounds_are_rejected(wrong: tuple[int, ...]) -> None:
    x = numbers(1, 2, 8)
    with pytest.raises(ValueError, match="not the bounds"):
        reference.linear(x, x, None, wrong)


def test_tree_sum_matches_its_definition() -> None:
    """The numbers make the sum depend on its order: neighbors first, then pairs of pairs."""
    parts = [torch.tensor([value]) for value in (1e8, -1e8, 1.0, 1e8, 1.0, 3.0, -1e8, 2.0)]
    p = [float(part) for part in parts]
    f = lambda value: torch.tensor(value, dtype=torch.float32).item()  # noqa: E731
    expected = f(f(f(p[0] + p[1]) + f(p[2] + p[3])) + f(f(p[4] + p[5]) + f(p[6] + p[7])))
    assert tree_sum(parts).item() == tree_sum(torch.stack(parts)).item() == expected
    assert expected != f(sum(p))
    with pytest.raises(ValueError, match="1, 2, 4, 8"):
        tree_sum(parts[:3])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (64, 576)])
def test_ranks_sum_like_the_tree(ranks: int, shape: tuple[int, ...]) -> None:
    parts = numbers(ranks, SEGMENTS, *shape) * 10.0 ** torch.arange(SEGMENTS).view(-1, 1, 1)
    groups, shards = ThreadGroup.make(ranks, patience=20), parts.chunk(ranks)
    for total in on_ranks(ranks, lambda rank: groups[rank].tree_sum(tree_sum(shards[rank]))):
        assert torch.equal(total, tree_sum(parts))


@FEW
@given(heights, widths, bounds(), dtypes, st.booleans(), st.integers(0, 9))
def test_reference_sums_segments(
    m: int, n: int, segments: tuple[int, ...], dtype: Any, with_bias: bool, seed: int
) -> None:
    x, weight = (
        numbers(seed, m, segments[-1], dtype=dtype),
        numbers(seed + 1, n, segments[-1], dtype=dtype),
    )
    bias = numbers(seed + 2, n, dtype=dtype) if with_bias else None
    got = reference.linear(x, weight, bias, segments)
    require_near(got, x, weight, bias)
    assert torch.equal(reference.linear(x[m // 2 :], weight, bias, segments), got[m // 2 :])
    half = len(segments) // 2  # tensors of two ranks, each in separate memory
    if len(segments) > 2:
        cut = segments[half]
        parts = [
            reference.linear(x[:, :cut], weight[:, :cut].clone(), None, segments[: half + 1]),
            reference.linear(
                x[:, cut:], weight[:, cut:].clone(), None, tuple(b - cut for b in segments[half:])
            ),
        ]
        whole = tree_sum(parts)
        assert torch.equal(whole if bias is None else whole + bias.float(), got)


@NEEDS_COMPILER
@FEW
@given(st.sampled_from(LAWS), heights, widths, bounds(), dtypes, st.booleans(), st.integers(0, 9))
def test_kernels_sum_segments(
    law: Law, m: int, n: int, segments: tuple[int, ...], dtype: Any, with_bias: bool, seed: int
) -> None:
    """Each segment has the bits of a separate product on any instruction set and thread count."""
    x, weight = (
        numbers(seed, m, segments[-1], dtype=dtype),
        numbers(seed + 1, n, segments[-1], dtype=dtype),
    )
    bias = numbers(seed + 2, n, dtype=dtype) if with_bias else None
    packed, best = as_packed(weight), CpuOps(2, available(law)[0])
    got = best.linear(x, packed, bias, segments)
    require_near(got, x, weight, bias)
    parts = [
        best.linear(x[:, first:end].contiguous(), as_packed(weight[:, first:end]))
        if first < end
        else torch.zeros(m, n)
        for first, end in pairwise(segments)
    ]
    whole = tree_sum(parts)
    assert torch.equal(whole if bias is None else whole + bias.float(), got)
    others = [CpuOps(1, name).linear(x, packed, bias, segments) for name in available(law)]
    assert all(torch.equal(other, got) for other in others)


@NEEDS_COMPILER
def test_kernels_read_pairs() -> None:
    x = numbers(1, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="even columns"):
        CpuOps(1).linear(x, as_packed(x), None, (0, 3, 8))
    with pytest.raises(ValueError, match="not the bounds"):
        CpuOps(1).linear(x, as_packed(x), None, (0, 4, 6))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_shards_add_up(dtype: torch.dtype) -> None:
    """Zeros keep their sign, so ranks have the bits of one."""
    weight = numbers(1, 50, 20, dtype=dtype)
    weight[7, 3], weight[40, 5] = -0.0, 0.0
    ids = torch.tensor([7, 0, 40, 49, 16, 15])
    backends: list[tuple[Any, Any]] = [
        (reference.embed, torch.Tensor.contiguous),
        (CpuOps(1).embed, as_packed),
    ]
    for embed, made in backends:
        expected = embed(ids, made(weight), 3.0)
        parts = [
            embed(ids, made(weight[first:end]), 3.0, (first, 50))
            for first, end in ((0, 16), (16, 50))
        ]
        assert torch.equal(tree_sum(parts).view(torch.int32), expected.view(torch.int32))
        assert expected[0, 3].signbit()
    for wrong in (-1, 50):
        with pytest.raises(ValueError, match="vocabulary"):
            CpuOps(1).embed(torch.tensor([wrong]), as_packed(weight[:16]), 1.0, (0, 50))


def require_near(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert got.dtype == torch.float32, "sums are not rounded"
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    bound = 4 * 2.0**-24 * math.sqrt(x.shape[1]) * (x.double().abs() @ weight.double().abs().T + 1)
    assert ((got.double() - exact).abs() <= bound).all()
