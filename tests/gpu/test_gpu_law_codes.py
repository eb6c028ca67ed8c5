"""The law for weights in 8 and 4 bits at the widths of real models. Products of int8 also have the
bits of their definition on a CPU, and fused products those of the operations that they replace.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.ops.cuda import few_rows, moe
from nano_inference.ops.cuda.backend import CudaOps
from nano_inference.ops.cuda.few_rows import Launch
from nano_inference.ops.cuda.quantised import AlignedWeight
from nano_inference.ops.formats import FORMATS, form_named
from nano_inference.ops.interface import FEW_ROWS, Norm
from nano_inference.ops.moe import Experts
from nano_inference.ops.reference.quantised import quantised_linear
from nano_inference.ops.settings import Routing
from tests.gpu.target import Target, numbers

pytestmark = pytest.mark.gpu

# columns of the result, columns of x, segments of x: of q, k and v, o, gate and up, down
WEIGHTS = {
    "0.6b": {
        "qkv": (4096, 1024, 1),
        "o": (1024, 2048, 8),
        "gate_up": (6144, 1024, 1),
        "down": (1024, 3072, 8),
    },
    "8b": {
        "qkv": (6144, 4096, 1),
        "o": (4096, 4096, 8),
        "gate_up": (24_576, 4096, 1),
        "down": (4096, 12_288, 8),
    },
}
TOY = {"qkv": (40, 96, 1), "gate_up": (40, 96, 1), "down": (40, 96, 8)}
COUNTS = (1, 2, 3, 8, 16, 17, 64, 65, 300)
ON_CPU = 9  # rows whose products are also computed by the definition
MOST_ON_CPU = 1 << 24  # of weights with at most this many numbers


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest, target: Target) -> torch.dtype:
    if target.dry and request.param == "bfloat16":
        pytest.skip("the interpreter multiplies matrices of bfloat16 wrongly")
    return getattr(torch, request.param)


def weights(
    target: Target, dtype: torch.dtype, codes: str, model: str
) -> dict[str, tuple[AlignedWeight, Tensor, Tensor]]:
    """Return weights by name, each with a bias and rows."""
    made: dict[str, tuple[AlignedWeight, Tensor, Tensor]] = {}
    device = torch.device(target.device)
    for name, (columns, depth, segments) in (TOY if target.dry else WEIGHTS[model]).items():
        bounds = tuple(depth // segments * part for part in range(segments + 1))
        weight = AlignedWeight((columns, depth), dtype, device, form_named(codes), bounds)
        weight.write(0, numbers(1, columns, depth, device=target.device, scale=0.05))
        bias = numbers(2, columns, device=target.device, dtype=dtype)
        x = numbers(3, target.size(600, 30), depth, device=target.device, dtype=dtype)
        made[name] = (weight, bias, x)
    return made


def counts(target: Target) -> tuple[int, ...]:
    """Return numbers of rows."""
    return (1, 2, 3, 17) if target.dry else COUNTS


@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize("model", WEIGHTS)
def test_coded_row_is_bitwise_independent_of_its_batch(
    target: Target, dtype: torch.dtype, model: str, codes: str
) -> None:
    if target.dry and model != "0.6b":
        pytest.skip("a dry run has one shape")
    ops = CudaOps(batch_invariant=True)
    for weight, bias, x in weights(target, dtype, codes, model).values():
        whole, shape = ops.linear(x, weight, bias), list(weight.shape)
        for rows in counts(target):
            first = (7 * rows) % (len(x) - rows)
            part = slice(first, first + rows)
            same = torch.equal(ops.linear(x[part], weight, bias), whole[part])
            assert same, f"{rows} rows of {shape}"
        if codes == "int8" and weight.numel() <= MOST_ON_CPU:
            host = AlignedWeight(
                weight.shape, dtype, torch.device("cpu"), weight.form, weight.bounds
            )
            host.data.copy_(weight.data.cpu())
            exact = quantised_linear(x[:ON_CPU].cpu(), host, bias.cpu())
            assert torch.equal(whole[:ON_CPU].cpu(), exact), f"a CPU, {shape}"


@pytest.mark.parametrize("model", WEIGHTS)
def test_fused_row_has_the_bits_of_plain_operations(target: Target, model: str) -> None:
    """Compare norm, codes and product, then a gate or an addition, each as its layer launches it."""
    if target.dry and model != "0.6b":
        pytest.skip("a dry run has one shape")
    dtype = torch.float16 if target.dry else torch.bfloat16
    ops, how = CudaOps(batch_invariant=True), Launch(norms=False)
    for name, (weight, bias, x) in weights(target, dtype, "int8", model).items():
        columns, depth = weight.shape
        norm = Norm(numbers(4, depth, device=target.device, dtype=dtype), 1e-6, 0.0, dtype)
        for rows in (1, 3) if target.dry else (1, 2, 3, FEW_ROWS):
            part, residual = x[:rows], numbers(5, rows, columns, device=target.device)
            stream = part.float()
            if name in ("qkv", "gate_up"):
                plain = ops.linear(ops.rms_norm(None, stream, norm, 1.0)[0], weight, bias)
            else:
                plain = ops.linear(part, weight, bias)
            if name == "qkv":
                fused = few_rows.product(stream, norm, weight, bias, how)
            elif name == "gate_up":
                fused = few_rows.product_gated(stream, norm, weight, bias, "silu", how)
                plain = ops.gate(plain, "silu").to(dtype)
            else:
                fused = few_rows.product_added(part, None, weight, bias, residual, 0.3, how)
                plain = ops.rms_norm(plain, residual, norm._replace(weight=None), 0.3)[1]
            assert torch.equal(fused, plain), f"{rows} rows of {name}"


def test_mxfp4_row_is_bitwise_independent_of_its_batch(target: Target, dtype: torch.dtype) -> None:
    """Send rows through experts of gpt-oss-20b's widths, all to one, or each to some."""
    hidden, inner, count = (64, 64, 2) if target.dry else (2880, 2880, 4)
    allocate, device = CudaOps(batch_invariant=True).allocate, torch.device(target.device)
    sizes = (count * 2 * inner, hidden), (count * hidden, inner)
    made: list[Any] = [allocate(size, dtype, device, form=FORMATS["mxfp4-32"]) for size in sizes]
    for seed, (weight, size) in enumerate(zip(made, sizes, strict=True)):
        weight.write(0, numbers(seed, *size, device=target.device, scale=0.05))
    router, routing = torch.zeros(count, hidden, device=device), Routing(2, True)
    gate_up, down = made
    experts = Experts(router, gate_up, down, count, routing, "clamped_swiglu")
    most = target.size(300, 20)
    x = numbers(3, most, hidden, device=target.device, dtype=dtype)
    rows = torch.arange(most, device=device)
    held = rows * 5 % count
    whole = moe.products(x, rows, held, experts)
    for number in (1, 2, 17) if target.dry else (1, 2, 16, 17, 64, 65):
        some = (7 * rows[:number]) % most
        assert torch.equal(moe.products(x, rows[some], held[some], experts), whole[some]), number
    members = rows[held == 1]
    assert torch.equal(moe.products(x, members, held[members], experts), whole[members])
