"""Gradients of the CPU kernels: near those of torch's autograd in float64, and the same bits on
every instruction set.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from nano_inference.ops.cpu.build import LAWS
from nano_inference.ops.cpu.gradients import (
    AdamRule,
    GradientKernels,
    HeadShape,
    LogitRule,
    Rotary,
    Rotated,
    RouteShape,
    Span,
)
from nano_inference.ops.interface import Norm
from nano_inference.ops.reference.backend import rotate
from nano_inference.ops.settings import Routing
from tests.depth import at_depth
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import available, kernels

pytestmark = NEEDS_COMPILER
FEW = settings(
    max_examples=at_depth(40), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
counts = st.integers(1, 90)
seeds = st.integers(0, 9)
ACTIVATIONS = st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"])
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # relative norm of an error


@pytest.fixture(scope="module", params=LAWS)
def each_set(request: pytest.FixtureRequest) -> list[str]:
    """Return all instruction sets of a law, which must agree."""
    return [*available(request.param)]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def runs(each_set: Sequence[str], dtype: torch.dtype) -> list[GradientKernels]:
    """Return every instruction set, and the first one on three threads."""
    single = [GradientKernels(kernels(name), dtype, 1) for name in each_set]
    return [*single, GradientKernels(kernels(each_set[0]), dtype, 3)]


def agreed(results: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Return the results of the first run, which all runs must equal bit for bit."""
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    return results[0]


def require_near(
    actual: Tensor, exact: Tensor, dtype: torch.dtype, terms: Tensor | None = None
) -> None:
    """Compare with float64, relative to the result or to larger terms that cancel in it."""
    error, size = (actual.double() - exact).norm(), exact.norm()
    if terms is not None:
        size = max(size, terms.double().norm())
    assert error <= NEAR[dtype] * size + 1e-6, f"{error / size:.2e}"


@FEW
@given(counts, counts, counts, dtypes, seeds)
def test_product_gradients_equal_autograd(
    each_set: list[str], n: int, rows: int, columns: int, dtype: Any, seed: int
) -> None:
    x, weight = (
        numbers(seed, n, columns, dtype=dtype),
        numbers(seed + 1, rows, columns, dtype=dtype),
    )
    d_out, start = numbers(seed + 2, n, rows), numbers(seed + 3, rows, columns)
    results = []
    for side in runs(each_set, dtype):
        total = start.clone()
        side.add_outer(d_out, x, total)
        d_x = side.product(side.rounded(d_out), side.packed_turned(weight))
        results.append([d_x, total, side.product(x, side.packed(weight))])
    d_x, total, out = agreed(results)
    rounded = d_out.to(dtype).double()
    require_near(d_x, rounded @ weight.double(), torch.float32)
    require_near(total - start, rounded.T @ x.double(), torch.float32)
    require_near(out, x.double() @ weight.double().T, torch.float32)


@FEW
@given(counts, st.integers(1, 3), st.integers(1, 70), st.booleans(), dtypes, seeds)
def test_norm_gradients_equal_autograd(
    each_set: list[str], n: int, heads: int, size: int, adds: bool, dtype: Any, seed: int
) -> None:
    x, d_out = numbers(seed, n, heads * size), numbers(seed + 1, n, heads * size)
    weight, before = numbers(seed + 2, size, dtype=dtype), numbers(seed + 3, n, heads * size)
    norm = Norm(weight, 1e-5, 1.0, dtype)
    results = []
    for side in runs(each_set, dtype):
        d_x, d_weight = before.clone(), torch.zeros(size)
        side.norm_gradient(x, norm, d_out, d_x, d_weight, adds=adds, scale=0.5)
        results.append([d_x, d_weight])
    d_x, d_weight = agreed(results)
    leaf, leaf_weight = (each.double().requires_grad_() for each in (x, weight))
    by_head = leaf.view(n, heads, size)
    scale = torch.rsqrt(by_head.pow(2).mean(-1, keepdim=True) + 1e-5)
    factors = scale * (1 + leaf_weight)
    normed = (by_head * factors).view_as(leaf)
    exact = torch.autograd.grad(normed, [leaf, leaf_weight], 0.5 * d_out.double())
    # A head of one number has a gradient of nearly 0: its two terms cancel.
    terms = 0.5 * d_out.view_as(by_head) * factors.detach()
    require_near(d_x - before if adds else d_x, exact[0], torch.float32, terms)
    require_near(d_weight, exact[1], torch.float32)


@FEW
@given(ACTIVATIONS, counts, counts, seeds)
def test_gate_gradients_equal_autograd(
    each_set: list[str], activation: str, n: int, inner: int, seed: int
) -> None:
    x, d_out = 5 * numbers(seed, n, 2 * inner), numbers(seed + 1, n, inner)
    own_runs = runs(each_set, torch.float32)
    (d_x,) = agreed([[side.gate_gradient(x, activation, d_out)] for side in own_runs])
    leaf = x.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    if activation == "silu":
        out = functional.silu(gate) * up
    elif activation == "gelu_tanh":
        out = functional.gelu(gate, approximate="tanh") * up
    else:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        out = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    require_near(d_x, torch.autograd.grad(out, leaf, d_out.double())[0], torch.float32)


@FEW
@given(counts, st.integers(1, 40), st.booleans(), st.booleans(), dtypes, seeds)
def test_rotation_gradients_equal_autograd(
    each_set: list[str], n: int, half: int, interleaved: bool, scaled: bool, dtype: Any, seed: int
) -> None:
    shape = HeadShape(4, 2, 2 * half)
    rows, angles = numbers(seed, n, shape.columns), numbers(seed + 1, 20, half)
    scales = 1 + numbers(seed + 2, 20).abs() if scaled else None
    places = torch.arange(n) * 7 % 20
    rotary = Rotary(angles.cos(), angles.sin(), interleaved, scales, places)
    weights = [
        numbers(seed + 3 + i, size, dtype=dtype) for i, size in enumerate((half * 2, half * 4))
    ]
    norms = Norm(weights[0], 1e-5, 0.0, dtype), Norm(weights[1], 1e-5, 0.0, dtype)
    d_parts = Rotated(*(numbers(seed + 5 + i, n, 2 * half * h) for i, h in enumerate((4, 2, 2))))
    results = []
    for side in runs(each_set, dtype):
        parts = side.rotate(rows, shape, rotary, norms)
        results.append([*parts, side.rotate_gradient(d_parts, shape, rotary)])
    *parts, d_rows = agreed(results)

    def turned(x: Tensor, norm: Tensor | None, is_query: bool) -> Tensor:
        if norm is not None:
            runs_of = x.reshape(n, -1, len(norm))
            root = torch.rsqrt(runs_of.pow(2).mean(-1, keepdim=True) + 1e-5)
            x = (runs_of * root * norm.double()).view_as(x)
        heads = x.reshape(n, -1, 2 * half)
        out = rotate(heads, rotary.cos[places].double(), rotary.sin[places].double(), interleaved)
        factor = scales[places].double()[:, None, None] if is_query and scales is not None else 1.0
        return (out * factor).flatten(1)

    cuts = [8 * half, 12 * half]
    q, k, v = rows.double().tensor_split(cuts, dim=1)
    exact = turned(q, weights[0], True), turned(k, weights[1], False), v
    for part, value in zip(parts, exact, strict=True):
        require_near(part, value, dtype)
    leaf = rows.double().requires_grad_()
    q, k, v = leaf.tensor_split(cuts, dim=1)
    outs = [turned(q, None, True), turned(k, None, False), v]
    (d_exact,) = torch.autograd.grad(outs, leaf, [each.double() for each in d_parts])
    require_near(d_rows, d_exact, torch.float32)


@FEW
@given(
    st.sampled_from([1, 5, 64, 65, 130]),
    st.sampled_from([0, 3, 140]),
    st.sampled_from([4, 16, 33, 64]),
    st.sampled_from([0, 1, 20, 100]),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
    dtypes,
    seeds,
)
def test_attention_gradients_equal_autograd(
    each_set: list[str],
    n: int,
    before: int,
    size: int,
    window: int,
    cap: float,
    has_sinks: bool,
    dtype: Any,
    seed: int,
) -> None:
    """The path skips three rows of the batch, which belong to another sequence."""
    shape, total = HeadShape(4, 2, size), before + 3 + n
    path = torch.cat((torch.arange(before), torch.arange(before + 3, total)))
    widths = [4 * size, 2 * size, 2 * size]
    parts = Rotated(*(numbers(seed + i, total, w, dtype=dtype) for i, w in enumerate(widths)))
    d_out, sinks = numbers(seed + 4, total, widths[0], dtype=dtype), numbers(seed + 5, 4)
    span = Span(path, n, window, size**-0.5, cap, sinks if has_sinks else None)
    results = []
    for side in runs(each_set, dtype):
        out, d_sinks = torch.zeros_like(parts.queries), torch.zeros(4)
        grads = Rotated(*(torch.zeros(each.shape) for each in parts))
        side.attend(parts, shape, span, out)
        side.attend_gradient(parts, shape, span, d_out, grads, d_sinks if has_sinks else None)
        results.append([out, *grads, d_sinks])
    out, *grads = agreed(results)
    leaves = [each.double().requires_grad_() for each in (*parts, sinks)]
    q, k, v = (x[path].view(len(path), -1, size).transpose(0, 1) for x in leaves[:3])
    k, v = (each.repeat_interleave(2, dim=0) for each in (k, v))
    scores = q[:, before:] @ k.transpose(1, 2) * span.scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    rows, keys = torch.arange(before, len(path))[:, None], torch.arange(len(path))
    hidden = (keys > rows) | ((keys <= rows - window) if window else False)
    scores = scores.masked_fill(hidden, -math.inf)
    if has_sinks:
        scores = torch.cat((scores, leaves[3][:, None, None].expand(-1, n, 1)), dim=2)
    odds = scores.softmax(dim=-1)[..., : len(path)]
    attended = (odds @ v).transpose(0, 1).flatten(1)
    own_rows = path[before:]
    require_near(out[own_rows], attended, dtype)
    exact = torch.autograd.grad(
        attended, leaves, d_out[own_rows].double(), allow_unused=True, materialize_grads=True
    )
    for grad, value in zip(grads, exact, strict=True):
        require_near(grad, value, dtype)


@FEW
@given(
    st.integers(1, 40),
    st.sampled_from([4, 17, 60]),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.sampled_from([0.0, 1e-20, 0.9]),
    st.sampled_from(["none", "plain", "gated"]),
    seeds,
)
def test_route_gradients_equal_autograd(
    each_set: list[str],
    n: int,
    count: int,
    scores: Any,
    renormalized: bool,
    floor: float,
    shared: Any,
    seed: int,
) -> None:
    shape = RouteShape(count, Routing(3, renormalized, scores, 2.5, floor), shared)
    logits = 2 * numbers(seed, n, count + (shared == "gated"))
    ids = numbers(seed + 1, n, count).topk(3).indices.sort().values.contiguous()
    d_weights = numbers(seed + 2, n, shape.num_weights)
    results = []
    for side in runs(each_set, torch.float32):
        weights = side.route_weights(logits, ids, shape)
        results.append([weights, side.route_gradient(logits, ids, shape, d_weights)])
    weights, d_logits = agreed(results)
    leaf = logits.double().requires_grad_()
    of_experts = leaf[:, :count]
    odds = of_experts.softmax(-1) if scores == "softmax" else of_experts.sigmoid()
    exact = odds.gather(1, ids)
    if renormalized:
        exact = exact / exact.sum(-1, keepdim=True).clamp(min=floor)
    exact = exact * 2.5
    if shared != "none":
        lone = leaf[:, count:].sigmoid() if shared == "gated" else torch.ones(n, 1).double()
        exact = torch.cat((exact, lone), dim=1)
    require_near(weights, exact.detach(), torch.float32)
    (expected,) = torch.autograd.grad(exact, leaf, d_weights.double())
    require_near(d_logits, expected, torch.float32)


@FEW
@given(counts, counts, seeds)
def test_row_products_equal_float64(each_set: list[str], n: int, columns: int, seed: int) -> None:
    a, b = numbers(seed, n, columns), numbers(seed + 1, n, columns)
    (sums,) = agreed([[side.row_products(a, b)] for side in runs(each_set, torch.float32)])
    terms = (a.double() * b.double()).abs().sum(1)
    assert bool(((sums - (a.double() * b.double()).sum(1)).abs() <= 1e-6 * terms).all())


@FEW
@given(
    st.integers(1, 20),
    st.sampled_from([1, 31, 385, 1100]),
    st.sampled_from([0.0, 5.0]),
    st.booleans(),
    seeds,
)
def test_logit_gradients_equal_autograd(
    each_set: list[str], n: int, vocab: int, cap: float, masked: bool, seed: int
) -> None:
    products = 4 * numbers(seed, n, vocab)
    rule = LogitRule(1.3, cap, 0.7)
    counts = [1 + i % min(3, vocab) for i in range(n)]
    ids = [
        sorted({(17 * i + 5 * t) % vocab for t in range(count)}) for i, count in enumerate(counts)
    ]
    starts = torch.tensor([0, *(len(row) for row in ids)]).cumsum(0)
    targets = torch.tensor([token for row in ids for token in row])
    gradients = numbers(seed + 1, len(targets))
    words = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32)
    allowed = torch.ones(vocab, dtype=torch.bool)
    if masked:
        words[:, 0] = 0x0F0F0F0F
        allowed[:32] = torch.tensor([0x0F0F0F0F >> bit & 1 for bit in range(32)]).bool()[:vocab]
    masks = torch.arange(n) % 2 - 1, words
    results = []
    for side in runs(each_set, torch.float32):
        logits = products.clone()
        side.logit_gradient(logits, (starts, targets, gradients), masks, rule)
        results.append([logits])
    (d_products,) = agreed(results)
    leaf = products.double().requires_grad_()
    levels = leaf / rule.divisor
    levels = (cap * torch.tanh(levels / cap) if cap else levels) / rule.temperature
    levels = torch.where((masks[0] == 0)[:, None] & ~allowed, -math.inf, levels)
    # a masked target keeps its own gradient, as in `head_gradients`
    total = levels.logsumexp(-1)
    own_rows = torch.arange(n).repeat_interleave(starts.diff())
    open_levels = leaf / rule.divisor
    open_levels = (cap * torch.tanh(open_levels / cap) if cap else open_levels) / rule.temperature
    value = (gradients.double() * (open_levels[own_rows, targets] - total[own_rows])).sum()
    require_near(d_products, torch.autograd.grad(value, leaf)[0], torch.float32)


@FEW
@given(st.integers(1, 60), counts, seeds)
def test_sums_of_rows_equal_torch(each_set: list[str], n: int, columns: int, seed: int) -> None:
    rows, ids = numbers(seed, n, columns), torch.arange(n) * 3 % 5
    results = []
    for side in runs(each_set, torch.float32):
        by_id, total = torch.ones(5, columns), torch.ones(columns)
        side.add_rows(rows, ids, by_id, 0.5)
        side.add_columns(rows, total)
        results.append([by_id, total, torch.tensor(side.sum_of_squares(rows))])
    by_id, total, squares = agreed(results)
    exact = torch.ones(5, columns).double().index_add_(0, ids, 0.5 * rows.double())
    require_near(by_id, exact, torch.float32)
    require_near(total, 1 + rows.double().sum(0), torch.float32)
    require_near(squares, rows.double().square().sum(), torch.float32)


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
