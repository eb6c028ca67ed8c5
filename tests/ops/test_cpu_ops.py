"""Products and row operations of the CPU kernels: within their error bound, and the same bits on
every instruction set.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.ops.cpu.backend import CpuOps
from nano_inference.ops.cpu.build import LAWS, Law
from nano_inference.ops.cpu.weights import PackedWeight
from nano_inference.ops.interface import HeadNorms, RopeArgs
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.rowwise import Norm
from tests.depth import at_depth
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import as_packed, available

pytestmark = NEEDS_COMPILER
FEW = settings(
    max_examples=at_depth(40), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
sizes = st.sampled_from([1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 96, 100, 130, 257, 576])
ROWS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 23, 24, 25, 63, 64, 65, 100])


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(2)


@pytest.fixture(scope="module", params=LAWS)
def each_set(request: pytest.FixtureRequest) -> list[CpuOps]:
    """Return all instruction sets of a law, which must agree."""
    return [CpuOps(1, name) for name in available(request.param)]


def numbers(
    seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def require_within_ulps(got: Tensor, exact: Tensor, ulps: float, floor: float = 0.0) -> None:
    error = (got.double() - exact).abs()
    allowed = ulps * ULP[got.dtype] * exact.abs().clamp(min=2.0**-126) + floor
    assert (error <= allowed).all(), f"{(error / allowed).max():.2f} times the allowed error"


def same_bits_alone(op: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Check that each row has the same bits alone and in another order."""
    together = op(rows)
    for i in range(0, len(rows), max(1, len(rows) // 4)):
        assert torch.equal(op(rows[i : i + 1].contiguous()), together[i : i + 1])
    turned = op(rows.flip(0).contiguous()).flip(0)
    assert torch.equal(turned, together)


@FEW
@given(ROWS, sizes, sizes, dtypes, st.booleans(), st.integers(0, 9))
def test_linear_is_within_its_bound(
    ops: CpuOps, m: int, k: int, n: int, dtype: Any, with_bias: bool, seed: int
) -> None:
    x, weight = numbers(seed, m, k, dtype=dtype), numbers(seed + 10, n, k, dtype=dtype)
    bias = numbers(seed + 20, n, dtype=dtype) if with_bias else None
    packed = as_packed(weight)
    got = ops.linear(x, packed, bias)
    assert got.dtype == torch.float32, "sums were rounded"
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    bound = 4 * 2.0**-24 * math.sqrt(k) * (x.double().abs() @ weight.double().abs().T + 1)
    assert ((got.double() - exact).abs() <= bound).all()
    same_bits_alone(lambda rows: ops.linear(rows, packed, bias), x)
    assert torch.equal(CpuOps(1).linear(x, packed, bias), got), "threads changed the bits"


@FEW
@given(st.sampled_from([1, 3, 64, 65]), sizes, sizes, dtypes, st.integers(0, 9))
def test_instruction_sets_agree_on_linear(
    each_set: list, m: int, k: int, n: int, dtype: Any, seed: int
) -> None:
    x, weight = numbers(seed, m, k, dtype=dtype), as_packed(numbers(seed + 10, n, k, dtype=dtype))
    results = [each.linear(x, weight) for each in each_set]
    assert all(torch.equal(results[0], other) for other in results[1:])


@FEW
@given(st.sampled_from(LAWS), st.sampled_from([1, 2, 17, 40]), sizes, st.integers(0, 9))
def test_sums_of_bfloat16_keep_their_law(law: Law, m: int, k: int, seed: int) -> None:
    """Products of two bfloat16 numbers are exact in float32, so each fma only rounds the sum."""
    x = numbers(seed, m, k, dtype=torch.bfloat16)
    weight = numbers(seed + 10, 20, k, dtype=torch.bfloat16)
    products = functional.pad(x.float()[:, None] * weight.float(), (0, k % 2)).unbind(2)
    total = torch.zeros(m, 20)
    if law == "pairs":
        for first, second in zip(products[::2], products[1::2], strict=True):
            total = (total + second) + first
    else:
        for start in range(0, k, 32):
            chunk = products[start : start + 32]
            total = total + (sum(chunk[::2]) + sum(chunk[1::2]))
    assert torch.equal(CpuOps(1, available(law)[0]).linear(x, as_packed(weight)), total)


def test_instruction_sets_agree_on_extreme_numbers(each_set: list) -> None:
    """On every path, denormals count as zero, and infinities and NaN propagate."""
    x, weight = numbers(1, 40, 64, dtype=torch.bfloat16), numbers(2, 48, 64, dtype=torch.bfloat16)
    x[:10] *= 1e-38
    x[10:20] *= 1e38
    weight[:8] *= 1e-20
    weight[8:16] *= 1e30
    x[30, 3], weight[40, 5] = math.inf, math.nan
    results = [each.linear(x, as_packed(weight)) for each in each_set]
    assert results[0].isnan().any()
    assert results[0].isinf().any()
    for other in results[1:]:
        assert torch.equal(
            results[0].view(torch.int32)[~results[0].isnan()],
            other.view(torch.int32)[~other.isnan()],
        )
        assert torch.equal(results[0].isnan(), other.isnan())


@FEW
@given(ROWS, sizes, dtypes, st.sampled_from([0.0, 1.0]), st.booleans(), st.integers(0, 9))
def test_rms_norm(
    ops: CpuOps, m: int, h: int, dtype: Any, offset: float, added: bool, seed: int
) -> None:
    residual, weight = (
        numbers(seed, m, h, scale=3),
        numbers(seed + 1, h, dtype=torch.float32 if offset else dtype),
    )
    x = numbers(seed + 2, m, h) if added else None
    norm = Norm(weight, 1e-5, offset, dtype)
    normed, after = ops.rms_norm(x, residual, norm, 0.5)
    total = residual.double() if x is None else residual.double() + 0.5 * x.double()
    require_within_ulps(after, total, 1, 1e-6)
    scale = 1 / (after.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    # Four roundings (the root, offset + weight, two products) are 2 ulps. The sum of squares adds
    # half of its error.
    require_within_ulps(normed, after.double() * scale * (offset + weight.double()), 2.5, 1e-30)
    same_bits_alone(lambda rows: ops.rms_norm(None, rows, norm)[0], residual)
    rounded, _ = ops.rms_norm(None, residual, Norm(None, 1e-5, 0.0, dtype))
    assert torch.equal(rounded, residual.to(dtype))


@FEW
@given(
    ROWS,
    sizes,
    dtypes,
    st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"]),
    st.sampled_from([1.0, 8.0, 60.0]),
    st.integers(0, 9),
)
def test_gate(
    ops: CpuOps, m: int, inner: int, dtype: Any, activation: str, scale: float, seed: int
) -> None:
    x = numbers(seed, m, 2 * inner, scale=scale)
    got = ops.gate(x, activation, dtype)
    gate, up = x.double().chunk(2, dim=-1)
    y = gate
    if activation == "gelu_tanh":
        y = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    elif activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        y = 1.702 * gate
    # e^y magnifies the rounding of y: |y| half ulps, which only a GELU of a large negative number
    # has to pay
    slack = {"silu": 2, "gelu_tanh": 4, "clamped_swiglu": 4}[activation]
    exact = gate / (1 + torch.exp(-y)) * up
    require_within_ulps(
        got, exact, slack, 1e-30 if activation == "silu" else 2e-6 * float(up.abs().max())
    )
    same_bits_alone(lambda rows: ops.gate(rows, activation, dtype), x)


@FEW
@given(sizes, st.integers(0, 9), st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"]), dtypes)
def test_instruction_sets_agree_on_rows(
    each_set: list, width: int, seed: int, activation: str, dtype: Any
) -> None:
    x = numbers(seed, 5, 2 * width, scale=20)
    weight = numbers(seed + 1, 2 * width, dtype=dtype)
    gates = [each.gate(x, activation, dtype) for each in each_set]
    norms = [each.rms_norm(None, x, Norm(weight, 1e-6, 0.0, dtype))[0] for each in each_set]
    assert all(torch.equal(gates[0], other) for other in gates[1:])
    assert all(torch.equal(norms[0], other) for other in norms[1:])


@FEW
@given(
    st.sampled_from([16, 48, 128]),
    st.sampled_from([1.0, 0.5, 0.25]),
    st.booleans(),
    st.booleans(),
    dtypes,
    st.integers(0, 9),
)
def test_rope_equals_reference_on_every_instruction_set(
    each_set: list,
    head_dim: int,
    share: float,
    interleaved: bool,
    scaled: bool,
    dtype: Any,
    seed: int,
) -> None:
    """Compare bitwise: a rotation is two products and a sum, each rounded."""
    rows, heads, kv_heads, cpu = 5, 4, 2, torch.device("cpu")
    qkv = numbers(seed, rows, (heads + 2 * kv_heads) * head_dim)
    angles = numbers(seed + 1, 9, int(head_dim * share) // 2)
    positions, slots = torch.tensor([3, 0, 8, 5, 1]), torch.arange(rows)
    scales = 1 + numbers(seed + 2, 9).abs() if scaled else None
    spec: Any = SimpleNamespace(
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        windows=(0,),
        state=None,
        kv_tensors=2,
        kinds=(),
    )

    def turned(operation: Any) -> list[Tensor]:
        storage = KVStorage(spec, 1, 16, dtype, cpu)
        storage.keys.zero_()
        storage.values.zero_()
        q = operation(
            qkv,
            RopeArgs(angles.cos(), angles.sin(), heads, kv_heads, HeadNorms(), interleaved, scales),
            positions,
            slots,
            storage,
            0,
        )
        return [q.to(dtype), storage.keys, storage.values]

    # the kernels store keys in their own order
    expected = turned(reference.rope_and_store)[0]
    results = [turned(each.rope_and_store) for each in each_set]
    for result in results:
        assert torch.equal(result[0], expected)
        assert result[1].any()
        assert all(map(torch.equal, result, results[0]))


@FEW
@given(sizes, sizes, dtypes, dtypes, st.data())
def test_packed_weight_gives_back_its_rows(
    rows: int, columns: int, dtype: Any, source: Any, data: Any
) -> None:
    weight = PackedWeight(rows, columns, dtype, data.draw(st.integers(1, 3)))
    tensor = numbers(3, rows, columns, dtype=source)
    cut = data.draw(st.integers(0, rows))
    weight.write(cut, tensor[cut:])
    weight.write(0, tensor[:cut])
    assert torch.equal(weight.read(), tensor.to(dtype))
    assert torch.equal(weight.read(cut, rows - cut), tensor[cut:].to(dtype))
    ids = torch.randint(rows, (7,))
    assert torch.equal(CpuOps(2).embed(ids, weight, 2.0), tensor.to(dtype).float()[ids] * 2)
    assert torch.equal(weight.clone().read(), weight.read())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x, w: (x.double(), w),
        lambda x, w: (x[:, ::2], w),
        lambda x, w: (x.to(torch.bfloat16), w),
        lambda x, w: (torch.cat([x, x], 1)[:, : x.shape[1]], w),
        lambda x, w: (x[:, :-1].contiguous(), w),
    ],
)
def test_mismatched_tensors_are_rejected(ops: CpuOps, spoil: Any) -> None:
    x, weight = numbers(1, 4, 32), as_packed(numbers(2, 16, 32))
    x, weight = spoil(x, weight)
    with pytest.raises((ValueError, TypeError)):
        ops.linear(x, weight)


def test_linear_with_zero_rows_and_embed_with_wrong_tokens(ops: CpuOps) -> None:
    weight = as_packed(numbers(2, 16, 32))
    assert ops.linear(numbers(1, 0, 32), weight).shape == (0, 16)
    for token in (-1, 16):
        with pytest.raises(ValueError, match="vocabulary"):
            ops.embed(torch.tensor([3, token]), weight)
    with pytest.raises(ValueError, match="int64"):
        ops.embed(torch.tensor([3], dtype=torch.int32), weight)
    with pytest.raises(ValueError, match="fit"):
        weight.write(10, numbers(1, 7, 32))
    with pytest.raises(ValueError, match="not within"):
        weight.read(10, 7)


def test_unaligned_tensor_is_read_in_place(ops: CpuOps) -> None:
    memory = numbers(1, 4 * 33 + 1)
    x = memory[1:].view(4, 33)
    weight = as_packed(numbers(2, 17, 33))
    assert torch.equal(ops.linear(x, weight), ops.linear(x.clone(), weight))
