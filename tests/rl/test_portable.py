"""Exponentials and sums for losses: near the exact values, differentiable, free of an order."""

import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import InvalidRequest
from nano_inference.rl import exact_sum, portable_exp

RECORDED = "505efa00e21deb059faacc060de04bf62c565d45ccb768ee1cbf610c96d86a25"
FLOATS = st.floats(-87, 88, width=32)


@given(st.lists(FLOATS, min_size=1, max_size=50))
def test_portable_exp_is_rounded_to_the_last_place(numbers: list[float]) -> None:
    values = torch.tensor(numbers, requires_grad=True)
    powers = portable_exp(values)
    for power, number in zip(powers.tolist(), numbers, strict=True):
        exact = math.exp(number)
        last_place = 2.0 ** (math.frexp(exact)[1] - 24)
        assert abs(power - exact) <= 0.501 * last_place
    powers.backward(torch.full_like(powers, 3.0))
    assert values.grad is not None
    assert torch.equal(values.grad, 3 * powers.detach())


def test_portable_exp_has_the_recorded_bits() -> None:
    """Torch's exponentials have other bits in one of 200 values, which depend on the processor."""
    values = torch.arange(-87 * 4096, 88 * 4096, dtype=torch.int32).float() / 4096
    assert hashlib.sha256(portable_exp(values).numpy().tobytes()).hexdigest() == RECORDED


def test_portable_exp_of_extremes() -> None:
    values = torch.tensor([0.0, -0.0, 89.0, math.inf, -math.inf, -150.0, math.nan])
    assert portable_exp(values).tolist()[:6] == [1, 1, math.inf, math.inf, 0, 0]
    assert portable_exp(values)[-1].isnan()
    assert portable_exp(torch.empty(0, 3)).shape == (0, 3)


@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=60))
def test_exact_sum_has_no_order(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32, requires_grad=True)
    total = exact_sum(values)
    assert total.item() == torch.tensor(math.fsum(numbers)).item()
    shuffled = values.detach()[torch.randperm(len(numbers))]
    assert torch.equal(exact_sum(shuffled), total)
    total.backward(torch.tensor(0.25))
    assert values.grad is not None
    assert torch.equal(values.grad, torch.full((len(numbers),), 0.25))


def test_exact_sum_of_infinities_is_that_of_torch() -> None:
    for numbers in ([math.inf, 1.0], [math.inf, -math.inf], [math.nan, 1.0]):
        values = torch.tensor(numbers)
        assert torch.equal(exact_sum(values).isnan(), values.sum().isnan())
        assert torch.equal(exact_sum(values).isinf(), values.sum().isinf())


@pytest.mark.parametrize("compute", [exact_sum, portable_exp])
def test_other_dtypes_are_rejected(compute: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(InvalidRequest, match=r"are torch\.float64; convert them to torch\.float32"):
        compute(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("compute", [exact_sum, portable_exp])
def test_gradients_equal_finite_differences(compute: Callable[[Tensor], Tensor]) -> None:
    values = torch.tensor([[0.3, -1.2], [2.0, 0.0]], requires_grad=True)
    compute(values).sum().backward()
    step, start = 1e-3, values.detach()
    assert values.grad is not None
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        moved = start.clone()
        moved[row, column] += step
        slope = float(compute(moved).sum() - compute(start).sum()) / step
        assert float(values.grad[row, column]) == pytest.approx(slope, rel=5e-3)
