"""Products of MXFP4 weights in Triton have the bits of the definition, for any other rows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.moe import Biases, Experts
from nano_inference.ops.quantised import Codes, encode, product, quantise_rows
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.settings import Routing
from tests.depth import at_depth
from tests.ops.test_triton_quantised import DEVICE, DTYPES, drawn

pytest.importorskip("triton")

from nano_inference.ops.cuda import moe
from nano_inference.ops.cuda.backend import CudaOps
from nano_inference.ops.cuda.microscaling import MXFP4, MicroscaledWeight, grouped_rows

HIDDEN = [32, 72, 96, 128]  # odd and even numbers of groups, and an incomplete one


def allocate(rows: int, columns: int, dtype: torch.dtype) -> MicroscaledWeight:
    weight = CudaOps(batch_invariant=True).allocate((rows, columns), dtype, DEVICE, form=MXFP4)
    assert isinstance(weight, MicroscaledWeight)
    return weight


def stored(rows: int, columns: int, seed: int, dtype: torch.dtype) -> MicroscaledWeight:
    weight = allocate(rows, columns, dtype)
    weight.write(0, drawn(rows, columns, seed=seed))
    return weight


@settings(deadline=None, max_examples=at_depth(40))
@given(
    columns=st.sampled_from(HIDDEN),
    rows=st.integers(1, 9),
    start=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
def test_codes_are_stored_unchanged(columns: int, rows: int, start: int, seed: int) -> None:
    """All numbers and all exponents of a file, and groups of zeros."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // 32)
    numbers = torch.tensor(MXFP4.values, dtype=torch.int8)
    codes = numbers[torch.randint(len(numbers), (rows, columns), generator=generator)].to(DEVICE)
    exponents = torch.randint(0, 255, (rows, groups), generator=generator)
    scales = torch.ldexp(torch.ones(rows, groups), exponents - 128).to(DEVICE)
    weight = stored(rows + start, columns, seed, torch.float32)
    before = weight.codes()
    weight.write_codes(start, Codes(codes, scales, MXFP4, (0, columns)))
    after = weight.codes()
    assert torch.equal(after.codes[start:], codes)
    assert torch.equal(after.scales[start:], scales)
    assert torch.equal(after.codes[:start], before.codes[:start])
    assert torch.equal(weight.read(start), (codes * scales.repeat_interleave(32, 1)[:, :columns]))


@pytest.mark.parametrize("columns", HIDDEN)
def test_weights_are_rounded_as_defined(columns: int) -> None:
    numbers = drawn(20, columns, seed=columns)
    numbers[3, 5] = torch.nan
    weight = allocate(20, columns, torch.float32)
    weight.write(0, numbers)
    expected = encode(numbers, MXFP4, (0, columns))
    assert torch.equal(weight.codes().codes, expected.codes)
    assert torch.equal(weight.codes().scales.isnan(), expected.scales.isnan())
    known = ~expected.scales.isnan().any(dim=1)
    assert torch.equal(weight.read()[known], expected.numbers()[known])


@settings(deadline=None, max_examples=at_depth(20))
@given(
    columns=st.sampled_from(HIDDEN),
    dtype=st.sampled_from(DTYPES),
    bad=st.sampled_from([torch.inf, -torch.inf, torch.nan]),
    seed=st.integers(0, 99),
)
def test_rows_are_rounded_by_group(columns: int, dtype: torch.dtype, bad: float, seed: int) -> None:
    weight, x = allocate(1, columns, dtype), drawn(4, columns, seed=seed, dtype=dtype)
    x[1, seed % columns] = bad
    codes, scales = grouped_rows(x, weight)
    expected = quantise_rows(x, weight.codes().groups)
    groups = expected[1].shape[1]
    assert torch.equal(codes[:, :columns].float(), expected[0])
    assert not codes[:, columns:].any()
    assert torch.equal(scales[:, :groups].isnan(), expected[1].isnan())
    assert torch.equal(scales[:, :groups].nan_to_num(7), expected[1].nan_to_num(7))


def made(hidden: int, inner: int, activation: str, dtype: torch.dtype, count: int = 5) -> Experts:
    """Return experts whose numbers and biases have the sizes of trained ones."""
    weights: list[Any] = []
    for seed, (rows, columns) in enumerate(((2 * inner, hidden), (hidden, inner))):
        weights.append(allocate(count * rows, columns, dtype))
        weights[-1].write(0, drawn(count * rows, columns, seed=seed).clamp(-3, 3))
    biases = Biases(
        torch.zeros(count, device=DEVICE),
        *(drawn(count * n, 1, seed=9)[:, 0].to(dtype) / 9 for n in (2 * inner, hidden)),
    )
    router = torch.zeros(count, hidden, device=DEVICE)
    routing = Routing(2, True)
    gate_up, down = weights
    return Experts(router, gate_up, down, count, routing, activation, biases=biases)


HELD = torch.tensor([0, 3, 3, 1, 4, 3, 0, 1, 3, 4, 3, 0, 4, 1], device=DEVICE)


def products_of(x: Tensor, experts: Experts, some: slice | Tensor = slice(None)) -> Tensor:
    rows = torch.arange(7, device=DEVICE).repeat_interleave(2)
    return moe.products(x, rows[some], HELD[some], experts)


@pytest.mark.parametrize("hidden", [48, 96])
def test_down_products_have_the_bits_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, hidden: int
) -> None:
    """Inner numbers are given, since exponentials of the reference differ in the last bit."""
    experts, sources = made(hidden, 72, "silu", torch.float16), list[Tensor]()
    launch = moe.quantised_experts.__globals__["grouped_rows"]

    def noted(x: Tensor, weight: Any) -> Any:
        sources.append(x)
        return launch(x, weight)

    monkeypatch.setitem(moe.quantised_experts.__globals__, "grouped_rows", noted)
    x = drawn(7, hidden, seed=3, dtype=torch.float16).clamp(-3, 3)
    result = products_of(x, experts)
    order, down = HELD.sort(stable=True)[1], experts.down.codes()
    assert experts.biases is not None
    for index, which in enumerate(order.tolist()):
        first = int(HELD[which]) * hidden
        weight = down.rows(first, first + hidden)
        inner = sources[1][index : index + 1].to(torch.float16)
        expected = product(inner, weight) + experts.biases.down[first : first + hidden].float()
        assert torch.equal(result[which : which + 1], expected)


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_experts_agree_with_the_reference(activation: str) -> None:
    """A row through an expert has the same bits among other rows."""
    experts = made(96, 64, activation, torch.float16)
    x = drawn(7, 96, seed=3, dtype=torch.float16).clamp(-3, 3)
    result = products_of(x, experts)
    rows = torch.arange(7, device=DEVICE).repeat_interleave(2)
    expected = reference.products(x, rows, HELD, experts)
    assert float((result - expected).norm() / expected.norm()) < 1e-3
    some = torch.tensor([8, 2, 13], device=DEVICE)
    assert torch.equal(products_of(x, experts, some), result[some])
