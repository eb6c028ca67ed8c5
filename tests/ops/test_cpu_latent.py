"""Latent attention of the CPU kernels: the per-head layout of the weight, and the
products with it.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.device.backends import choose_ops
from nano_inference.errors import ConfigError
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.cpu.backend import CpuOps
from nano_inference.ops.cpu.build import LAWS
from nano_inference.ops.cpu.latent import LatentWeight
from nano_inference.ops.cpu.program import run_once
from nano_inference.ops.interface import LatentWeights
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import Latent
from tests.depth import at_depth
from tests.models.tiny import MORE_FAMILIES, llama_config
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import available
from tests.ops.test_cpu_ops import (
    ROWS,
    ULP,
    numbers,
    require_within_ulps,
    same_bits_alone,
)

pytestmark = NEEDS_COMPILER
DTYPES = [torch.float32, torch.bfloat16]
SMALL = Latent(rank=32, rotary=16, plain=24, value=48)
SIZES = [(4, SMALL), (3, Latent(rank=48, rotary=16, plain=15, value=16))]
DEEPSEEK = Latent(rank=512, rotary=64, plain=128, value=128)
FEW = settings(
    max_examples=at_depth(30), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module", params=LAWS)
def each_set(request: pytest.FixtureRequest) -> list[CpuOps]:
    """Return the instruction sets of a law. The best set appears twice: with one thread and with
    two.
    """
    names = available(request.param)
    return [*(CpuOps(1, name) for name in names), CpuOps(2, names[0]), CpuOps(3, names[0])]


def plain_weight(heads: int, sizes: Latent, dtype: torch.dtype, seed: int = 0) -> Tensor:
    rows = heads * (sizes.plain + sizes.value)
    return numbers(seed, rows, sizes.rank, dtype=dtype, scale=sizes.rank**-0.5)


def as_latent(weight: Tensor, sizes: Latent) -> LatentWeight:
    packed = LatentWeight(len(weight), sizes, weight.dtype, num_threads=1)
    packed.write(0, weight)
    return packed


# -- the weight ------------------------------------------------------------------------------------


@FEW
@given(st.sampled_from(SIZES), st.sampled_from(DTYPES), st.data())
def test_weight_is_written_and_read_by_rows(
    shape: tuple[int, Latent], dtype: torch.dtype, data: st.DataObject
) -> None:
    heads, sizes = shape
    expected = plain_weight(heads, sizes, dtype)
    weight = as_latent(expected, sizes)
    assert weight.shape == expected.shape
    assert weight.numel() == expected.numel()
    start = 0
    for _ in range(3):
        start = data.draw(st.integers(0, len(expected)))
        stop = data.draw(st.integers(start, len(expected)))
        new = numbers(start, stop - start, sizes.rank)
        weight.write(start, new)
        expected[start:stop] = new.to(dtype)
        assert torch.equal(weight.read(start, stop - start), expected[start:stop])
    count = data.draw(st.integers(0, 40))
    places = torch.randperm(expected[start:].numel())[:count]
    weight.patch(start, places, numbers(1, len(places)))
    expected[start:].view(-1)[places] = numbers(1, len(places)).to(dtype)
    assert torch.equal(weight.read(), expected)
    copy = weight.clone()
    weight.write(0, torch.zeros_like(expected))
    assert torch.equal(copy.read(), expected)


def test_weight_rejects_mismatched_tensors() -> None:
    weight = as_latent(plain_weight(4, SMALL, torch.float32), SMALL)
    rows = weight.rows
    for start, shape in ((-1, (1, 32)), (rows, (1, 32)), (0, (1, 33)), (0, (32,))):
        with pytest.raises(ValueError, match="do not fit"):
            weight.write(start, torch.zeros(shape))
    with pytest.raises(ValueError, match="not within"):
        weight.read(0, rows + 1)
    with pytest.raises(ValueError, match="not within"):
        weight.patch(rows - 1, torch.tensor([32]), torch.ones(1))
    with pytest.raises(ValueError, match="value must be a multiple of 16"):
        LatentWeight(4 * 44, SMALL._replace(value=20), torch.float32, 1)


# -- the products ----------------------------------------------------------------------------------


class Case:
    """Rows, latents, and the double-precision result."""

    def __init__(self, heads: int, sizes: Latent, dtype: torch.dtype, num_rows: int) -> None:
        self.sizes = sizes
        weight = plain_weight(heads, sizes, dtype)
        self.plain, self.kv = weight, as_latent(weight, sizes)
        self.norm = Norm(numbers(1, sizes.rank, scale=0.3).to(dtype) + 1, 1e-6, 0.0, dtype)
        query = sizes.plain + sizes.rotary
        self.q = numbers(2, num_rows, heads * query, dtype=dtype).float()
        self.c = numbers(3, num_rows, sizes.rank + sizes.rotary, dtype=dtype).float()
        self.attended = numbers(4, num_rows, heads * sizes.key, dtype=dtype)
        self.of_heads = weight.double().unflatten(0, (heads, -1))

    @property
    def weights(self) -> LatentWeights:
        return LatentWeights(self.kv, self.norm, self.sizes)

    def meet(self, ops: CpuOps) -> Tensor:
        return queries_and_keys(ops, self.q, self.c, self.weights)

    def values(self, ops: CpuOps) -> Tensor:
        return ops.latent.values(self.attended, self.weights)


def queries_and_keys(ops: CpuOps, q: Tensor, c: Tensor, weights: LatentWeights) -> Tensor:
    """Return the queries over latents and, twice, the key."""
    return run_once(
        lambda r, q, c: r.meet(q, c, weights),
        *(q, c.clone()),
        dtype=weights.kv.dtype,
        num_threads=ops.num_threads,
        kernels=ops.kernels,
    )[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SIZES, (16, DEEPSEEK)], ids=str)
def test_products_are_within_their_bound(shape: tuple[int, Latent], dtype: torch.dtype) -> None:
    (heads, sizes), ops = shape, CpuOps(2)
    case = Case(heads, sizes, dtype, 7)
    met = case.meet(ops)
    assert met.dtype == torch.float32
    met = met.unflatten(1, (heads + 2, -1))
    q = case.q.double().unflatten(1, (heads, -1))
    keys = case.of_heads[:, : sizes.plain]
    exact = torch.einsum("nhp,hpr->nhr", q[:, :, : sizes.plain], keys)
    size = torch.einsum("nhp,hpr->nhr", q[:, :, : sizes.plain].abs(), keys.abs())
    assert ((met[:, :heads, sizes.rotary :] - exact).abs() <= 2.0**-22 * size).all()
    assert torch.equal(met[:, :heads, : sizes.rotary], q[:, :, sizes.plain :].float())
    assert torch.equal(met[:, heads, : sizes.rotary], case.c[:, sizes.rank :])
    latents = case.c[:, : sizes.rank].double()
    normed = latents / (latents.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert case.norm.weight is not None
    normed = normed * case.norm.weight.double()
    require_within_ulps(met[:, heads, sizes.rotary :], normed, 4)
    assert torch.equal(met[:, heads], met[:, heads + 1])

    values = case.values(ops)
    assert values.dtype == dtype
    attended = case.attended.double().unflatten(1, (heads, -1))[:, :, sizes.rotary :]
    rows = case.of_heads[:, sizes.plain :]
    exact = torch.einsum("nhr,hvr->nhv", attended, rows).flatten(1)
    size = torch.einsum("nhr,hvr->nhv", attended.abs(), rows.abs()).flatten(1)
    floor = 2.0**-21 * float(size.max())
    require_within_ulps(values, exact, 1 if dtype == torch.bfloat16 else 0, floor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_agrees_with_latent_kernels(dtype: torch.dtype) -> None:
    case, ops = Case(4, SMALL, dtype, 9), CpuOps(2)
    weights = LatentWeights(case.plain, case.norm, SMALL)
    expected = reference.meet(case.q.to(dtype), case.c.to(dtype), weights)
    step = ULP[dtype]
    torch.testing.assert_close(case.meet(ops), expected.float(), rtol=step, atol=8 * step)
    expected = reference.latent_values(case.attended, weights)
    torch.testing.assert_close(case.values(ops), expected, rtol=step, atol=8 * step)


@pytest.mark.thorough
@FEW
@given(ROWS, st.sampled_from(SIZES), st.sampled_from(DTYPES))
def test_latent_row_is_bitwise_independent_of_its_batch(
    each_set: list[CpuOps], num_rows: int, shape: tuple[int, Latent], dtype: Any
) -> None:
    """Vary the other rows, the number of threads and the instruction set."""
    case = Case(*shape, dtype, num_rows)
    results = [(case.meet(ops), case.values(ops)) for ops in each_set]
    for met, values in results[1:]:
        assert torch.equal(met, results[0][0])
        assert torch.equal(values, results[0][1])
    same_bits_alone(lambda x: CpuOps(2).latent.values(x, case.weights), case.attended)
    rows = torch.cat((case.q, case.c), dim=1)
    split = case.q.shape[1]
    same_bits_alone(
        lambda x: queries_and_keys(
            CpuOps(2), x[:, :split].contiguous(), x[:, split:].contiguous(), case.weights
        ),
        rows,
    )


@pytest.mark.parametrize("what", ["q", "c", "attended"])
def test_mismatched_rows_are_rejected(what: str) -> None:
    case = Case(4, SMALL, torch.float32, 3)
    setattr(case, what, getattr(case, what)[:, 1:].contiguous())
    with pytest.raises(ValueError, match="rows of"):
        case.values(CpuOps(1)) if what == "attended" else case.meet(CpuOps(1))


def test_unsupported_model_sizes_are_rejected() -> None:
    fields = llama_config() | MORE_FAMILIES["deepseek-v3"] | {"v_head_dim": 20}
    config = EngineConfig("of-these-sizes", device="cpu", backend="cpu")
    specs = {"policy": spec_from_config(fields)}
    with pytest.raises(ConfigError, match=r"ranks and values that are multiples of 16; .*value=20"):
        choose_ops(config, specs, torch.float32, torch.device("cpu"))
