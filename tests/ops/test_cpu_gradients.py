"""Gradients of the CPU kernels: near those of torch's autograd in float64, and the same bits on
every instruction set.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.cpu.build import LAWS
from nano_inference.ops.cpu.gradients import AdamRule, GradientKernels
from tests.depth import at_depth
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import available, kernels
from tests.ops.gradient_cases import cases, numbers, require_near

pytestmark = NEEDS_COMPILER
FEW = settings(
    max_examples=at_depth(40), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
seeds = st.integers(0, 9)
CASES = cases(dtypes)


@pytest.fixture(scope="module", params=LAWS)
def each_set(request: pytest.FixtureRequest) -> list[str]:
    """Return all instruction sets of a law, which must agree."""
    return [*available(request.param)]


def runs(each_set: Sequence[str], dtype: torch.dtype) -> list[GradientKernels]:
    """Return every instruction set, and the first one on three threads."""
    single = [GradientKernels(kernels(name), dtype, 1) for name in each_set]
    return [*single, GradientKernels(kernels(each_set[0]), dtype, 3)]


def agreed(results: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Return the results of the first run, which all runs must equal bit for bit."""
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    return results[0]


@pytest.mark.parametrize("operation", CASES)
@FEW
@given(st.data())
def test_cpu_gradients_equal_autograd(each_set: list[str], operation: str, data: Any) -> None:
    case = data.draw(CASES[operation])
    case.require(agreed([case.run(side) for side in runs(each_set, case.dtype)]))


@FEW
@given(st.integers(1, 60), st.integers(1, 90), seeds)
def test_sums_of_squares_equal_torch(each_set: list[str], n: int, columns: int, seed: int) -> None:
    rows = numbers(seed, n, columns)
    results = [[torch.tensor(side.sum_of_squares(rows))] for side in runs(each_set, torch.float32)]
    require_near(agreed(results)[0], rows.double().square().sum(), torch.float32)


@FEW
@given(st.integers(1, 300), st.booleans(), dtypes, seeds)
def test_instruction_sets_agree_on_adam_steps(
    each_set: list[str], count: int, has_largest: bool, dtype: Any, seed: int
) -> None:
    rule = AdamRule(0.99, 0.1, 0.999, 0.001, 0.02, 0.3, 1e-8, -0.5)
    names = ("mean", "square", *(["largest"] if has_largest else []))
    results = []
    for side in runs(each_set, dtype):
        param, gradient = numbers(seed, count, dtype=dtype), numbers(seed + 1, count, dtype=dtype)
        moments = {name: numbers(seed + 2, count, dtype=dtype).abs() for name in names}
        side.adam_step(param, gradient, moments, rule)
        results.append([param, *moments.values()])
    agreed(results)


def test_mismatched_rows_are_rejected() -> None:
    side = GradientKernels(kernels(), torch.float32, 1)
    weight = side.packed(numbers(1, 8, 16))
    with pytest.raises(ValueError, match="do not give"):
        side.product(numbers(2, 3, 15), weight)
    with pytest.raises(ValueError, match="do not give"):
        side.product(numbers(2, 3, 16, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="contiguous"):
        side.packed(numbers(1, 8, 32)[:, ::2])
    with pytest.raises(ValueError, match="not within"):
        side.add_rows(numbers(1, 2, 4), torch.tensor([0, 5]), torch.zeros(5, 4))
    with pytest.raises(ValueError, match="products read"):
        GradientKernels(kernels(), torch.float16, 1)
