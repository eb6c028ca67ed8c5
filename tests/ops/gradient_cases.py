"""Cases of `GradientOps`: inputs, the operations to run, and the results of autograd in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.nn import functional

from nano_inference.ops.gradients import (
    AttentionRule,
    GradientOps,
    HeadShape,
    LogitRule,
    PathRows,
    Rotary,
    Rotated,
    RouteShape,
)
from nano_inference.ops.reference.backend import rotate
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import Routing

# relative norm of an error
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Case(Protocol):
    """One operation or several, with inputs.

    Attributes:
        dtype: Dtype of products' inputs.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def run(self, side: Any) -> Sequence[Tensor]:
        """Return the results of an implementation."""
        ...

    def require(self, results: Sequence[Tensor]) -> None:
        """Compare results on the CPU with autograd."""
        ...


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def require_near(
    actual: Tensor, exact: Tensor, dtype: torch.dtype, terms: Tensor | None = None
) -> None:
    """Compare with float64, relative to the result or to larger terms that cancel in it."""
    error, size = (actual.double() - exact).norm(), exact.norm()
    if terms is not None:
        size = max(size, terms.double().norm())
    assert error <= NEAR[dtype] * size + 1e-6, f"{error / size:.2e}"


@dataclass(frozen=True)
class Products:
    n: int
    rows: int
    columns: int
    has_bias: bool
    dtype: torch.dtype
    seed: int

    def inputs(self) -> tuple[Tensor, ...]:
        return (
            numbers(self.seed, self.n, self.columns, dtype=self.dtype),
            numbers(self.seed + 1, self.rows, self.columns, dtype=self.dtype),
            numbers(self.seed + 2, self.n, self.rows),
            numbers(self.seed + 3, self.rows, self.columns),
            numbers(self.seed + 4, self.rows, dtype=self.dtype),
        )

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        x, weight, d_out, start, bias = (each.to(side.device) for each in self.inputs())
        total = start.clone()
        side.add_outer(d_out, x, total, 0.5)
        d_x = side.product(side.rounded(d_out), side.packed_turned(weight))
        bias = bias if self.has_bias else None
        out = side.product(x, side.packed(weight), bias)
        added = d_out.clone()
        side.add_product(x, side.packed(weight), added, 0.25, bias)
        return [d_x, total, out, added]

    def require(self, results: Sequence[Tensor]) -> None:
        x, weight, d_out, start, bias = (each.double() for each in self.inputs())
        rounded = d_out.to(self.dtype).double()
        product = x @ weight.T + (bias if self.has_bias else 0)
        exact = rounded @ weight, start + 0.5 * rounded.T @ x, product, d_out + 0.25 * product
        for actual, value in zip(results, exact, strict=True):
            require_near(actual, value, torch.float32)


@dataclass(frozen=True)
class Norms:
    n: int
    heads: int
    size: int
    adds: bool
    apart: bool  # the gradient of x is not written over that of the output
    dtype: torch.dtype
    seed: int

    def inputs(self) -> tuple[Tensor, ...]:
        wide = self.heads * self.size
        return (
            numbers(self.seed, self.n, wide + 8),
            numbers(self.seed + 1, self.n, wide),
            numbers(self.seed + 2, self.size, dtype=self.dtype),
            numbers(self.seed + 3, self.n, wide),
        )

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        x, d_out, weight, before = (each.to(side.device) for each in self.inputs())
        norm = Norm(weight, 1e-5, 1.0, self.dtype)
        d_weight = torch.zeros(self.size, device=side.device)
        adds = self.adds and self.apart
        d_x = before.clone() if self.apart else d_out
        side.norm_gradient(x[:, 8:], norm, d_out, d_x, d_weight, adds=adds, scale=0.5)
        return [d_x - before if adds else d_x, d_weight]

    def require(self, results: Sequence[Tensor]) -> None:
        x, d_out, weight, _ = self.inputs()
        leaf, leaf_weight = (each.double().requires_grad_() for each in (x[:, 8:], weight))
        by_head = leaf.reshape(self.n, self.heads, self.size)
        scale = torch.rsqrt(by_head.pow(2).mean(-1, keepdim=True) + 1e-5)
        factors = scale * (1 + leaf_weight)
        normed = (by_head * factors).view_as(leaf)
        exact = torch.autograd.grad(normed, [leaf, leaf_weight], 0.5 * d_out.double())
        # A head of one number has a gradient of nearly 0: its two terms cancel.
        terms = 0.5 * d_out.view_as(by_head) * factors.detach()
        require_near(results[0], exact[0], torch.float32, terms)
        require_near(results[1], exact[1], torch.float32)


@dataclass(frozen=True)
class Gates:
    activation: str
    n: int
    inner: int
    dtype: torch.dtype
    seed: int

    def inputs(self) -> tuple[Tensor, Tensor]:
        return (
            5 * numbers(self.seed, self.n, 2 * self.inner),
            numbers(self.seed + 1, self.n, self.inner),
        )

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        x, d_out = (each.to(side.device) for each in self.inputs())
        return [side.gate_gradient(x, self.activation, d_out), side.gate(x, self.activation)]

    def require(self, results: Sequence[Tensor]) -> None:
        x, d_out = self.inputs()
        leaf = x.double().requires_grad_()
        gate, up = leaf.chunk(2, dim=1)
        if self.activation == "silu":
            out = functional.silu(gate) * up
        elif self.activation == "gelu_tanh":
            out = functional.gelu(gate, approximate="tanh") * up
        else:
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            out = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        exact = torch.autograd.grad(out, leaf, d_out.double())[0]
        require_near(results[0], exact, torch.float32)
        require_near(results[1], out.detach(), self.dtype)


@dataclass(frozen=True)
class Rotations:
    n: int
    half: int
    interleaved: bool
    scaled: bool
    still: int  # numbers of a head that do not rotate
    normed: bool
    dtype: torch.dtype
    seed: int

    @property
    def shape(self) -> HeadShape:
        return HeadShape(4, 2, 2 * self.half + self.still)

    def inputs(self) -> tuple[Tensor, Rotary, tuple[Tensor, Tensor], Rotated]:
        size = self.shape.head_dim
        angles = numbers(self.seed + 1, 20, self.half)
        scales = 1 + numbers(self.seed + 2, 20).abs() if self.scaled else None
        positions = torch.arange(self.n) * 7 % 20
        rotary = Rotary(angles.cos(), angles.sin(), self.interleaved, scales, positions)
        # one norm of a head, one of all heads of a row
        norms = (
            numbers(self.seed + 3, size, dtype=self.dtype),
            numbers(self.seed + 4, 2 * size, dtype=self.dtype),
        )
        parts = (numbers(self.seed + 5 + i, self.n, size * h) for i, h in enumerate((4, 2, 2)))
        return numbers(self.seed, self.n, self.shape.columns), rotary, norms, Rotated(*parts)

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        rows, rotary, weights, d_parts = self.inputs()
        on, scales = side.device, rotary.query_scales
        rotary = Rotary(
            rotary.cos.to(on),
            rotary.sin.to(on),
            self.interleaved,
            None if scales is None else scales.to(on),
            rotary.positions.to(on),
        )
        query_norm, key_norm = (
            Norm(weight.to(side.device), 1e-5, 0.0, self.dtype) if self.normed else None
            for weight in weights
        )
        parts = side.rotate(rows.to(side.device), self.shape, rotary, (query_norm, key_norm))
        d_parts = Rotated(*(each.to(side.device) for each in d_parts))
        return [*parts, side.rotate_gradient(d_parts, self.shape, rotary)]

    def require(self, results: Sequence[Tensor]) -> None:
        rows, rotary, weights, d_parts = self.inputs()
        size, places, scales = self.shape.head_dim, rotary.positions, rotary.query_scales
        cos, sin = rotary.cos[places].double(), rotary.sin[places].double()

        def turned(x: Tensor, norm: Tensor | None, is_query: bool) -> Tensor:
            if norm is not None:
                runs_of = x.reshape(self.n, -1, len(norm))
                root = torch.rsqrt(runs_of.pow(2).mean(-1, keepdim=True) + 1e-5)
                x = (runs_of * root * norm.double()).view_as(x)
            out = rotate(x.reshape(self.n, -1, size), cos, sin, self.interleaved)
            factor = (
                scales[places].double()[:, None, None] if is_query and scales is not None else 1
            )
            return (out * factor).flatten(1)

        cuts = [4 * size, 6 * size]
        q, k, v = rows.double().tensor_split(cuts, dim=1)
        norms = weights if self.normed else (None, None)
        exact = turned(q, norms[0], True), turned(k, norms[1], False), v
        for part, value in zip(results[:3], exact, strict=True):
            require_near(part, value, self.dtype)
        leaf = rows.double().requires_grad_()
        q, k, v = leaf.tensor_split(cuts, dim=1)
        outs = [turned(q, None, True), turned(k, None, False), v]
        (d_exact,) = torch.autograd.grad(outs, leaf, [each.double() for each in d_parts])
        require_near(results[3], d_exact, torch.float32)


@dataclass(frozen=True)
class Attentions:
    """A tree of segments: each continues the path of an earlier one up to a row, or is a root."""

    lengths: tuple[int, ...]
    branches: tuple[int, ...]  # segment i continues after row `branches[i]` modulo the earlier + 1
    size: int
    heads: tuple[int, int]
    window: int
    cap: float
    has_sinks: bool
    dtype: torch.dtype
    seed: int

    @property
    def shape(self) -> HeadShape:
        return HeadShape(*self.heads, self.size)

    def segments(self) -> list[PathRows]:
        segments: list[PathRows] = []
        paths: list[list[int]] = []  # of each row
        for length, branch in zip(self.lengths, self.branches, strict=True):
            row = branch % (len(paths) + 1) - 1
            path = list(paths[row]) if row >= 0 else []
            for _ in range(length):
                path = [*path, len(paths)]
                paths.append(path)
            segments.append(PathRows(torch.tensor(path), length))
        return segments

    def inputs(self) -> tuple[Rotated, Tensor, Tensor]:
        shape, total = self.shape, sum(self.lengths)
        widths = [count * self.size for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        parts = (numbers(self.seed + i, total, w, dtype=self.dtype) for i, w in enumerate(widths))
        d_out = numbers(self.seed + 4, total, widths[0], dtype=self.dtype)
        return Rotated(*parts), d_out, 3 * numbers(self.seed + 5, shape.heads)

    @property
    def scale(self) -> float:
        return self.size**-0.5

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        return self.results(side, self.segments(), self.inputs())

    def results(
        self,
        side: GradientOps,
        segments: Sequence[PathRows],
        inputs: tuple[Rotated, Tensor, Tensor],
    ) -> Sequence[Tensor]:
        parts, d_out, sinks = inputs
        parts = Rotated(*(each.to(side.device) for each in parts))
        placed = sinks.to(side.device) if self.has_sinks else None
        rule = AttentionRule(self.window, self.scale, self.cap, placed)
        paths, d_sinks = side.paths(segments), torch.zeros(len(sinks), device=side.device)
        attended = side.attend(parts, self.shape, paths, rule)
        wanted = d_sinks if self.has_sinks else None
        grads = side.attend_gradient(
            parts, self.shape, paths, rule, attended, d_out.to(side.device), wanted
        )
        return [attended.out, *grads, d_sinks]

    def require(self, results: Sequence[Tensor]) -> None:
        parts, d_out, sinks = self.inputs()
        leaves = [each.double().requires_grad_() for each in (*parts, sinks)]
        outs = [self._attended(leaves, segment) for segment in self.segments()]
        attended = torch.cat(outs)
        require_near(results[0], attended.detach(), self.dtype)
        exact = torch.autograd.grad(
            attended, leaves, d_out.double(), allow_unused=True, materialize_grads=True
        )
        largest = max(float(value.norm()) for value in exact)
        for grad, value in zip(results[1:], exact, strict=True):
            # with one visible key, gradients of scores are 0
            require_near(grad, value, self.dtype, torch.tensor(0.05 * largest))

    def _attended(self, leaves: Sequence[Tensor], segment: PathRows) -> Tensor:
        path, n, group = segment.path, segment.num_rows, self.shape.group
        q, k, v = (x[path].view(len(path), -1, self.size).transpose(0, 1) for x in leaves[:3])
        k, v = (each.repeat_interleave(group, dim=0) for each in (k, v))
        before = len(path) - n
        scores = q[:, before:] @ k.transpose(1, 2) * self.scale
        scores = self.cap * torch.tanh(scores / self.cap) if self.cap else scores
        rows, keys = torch.arange(before, len(path))[:, None], torch.arange(len(path))
        hidden = (keys > rows) | ((keys <= rows - self.window) if self.window else False)
        scores = scores.masked_fill(hidden, -math.inf)
        if self.has_sinks:
            columns = leaves[3][:, None, None].expand(-1, n, 1)
            scores = torch.cat((scores, columns), dim=2)
        odds = scores.softmax(dim=-1)[..., : len(path)]
        return (odds @ v).transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class Logits:
    n: int
    vocab: int
    cap: float
    masked: bool
    dtype: torch.dtype
    seed: int

    rule = property(lambda self: LogitRule(1.3, self.cap, 0.7))

    def inputs(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        counts = [1 + i % min(3, self.vocab) for i in range(self.n)]
        ids = [
            sorted({(17 * i + 5 * t) % self.vocab for t in range(count)})
            for i, count in enumerate(counts)
        ]
        starts = torch.tensor([0, *(len(row) for row in ids)]).cumsum(0)
        targets = torch.tensor([token for row in ids for token in row])
        words = torch.full((1, -(-self.vocab // 32)), -1, dtype=torch.int32)
        if self.masked:
            words[:, 0] = 0x0F0F0F0F
        gradients = numbers(self.seed + 1, len(targets))
        masks = torch.arange(self.n) % 2 - 1, words
        return 4 * numbers(self.seed, self.n, self.vocab), (starts, targets, gradients), masks

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        products, targets, masks = self.inputs()
        logits = products.clone().to(side.device)
        starts, ids, gradients = (each.to(side.device) for each in targets)
        mask_rows, words = (each.to(side.device) for each in masks)
        side.logit_gradient(logits, (starts, ids, gradients), (mask_rows, words), self.rule)
        return [logits]

    def require(self, results: Sequence[Tensor]) -> None:
        products, (starts, targets, gradients), masks = self.inputs()
        allowed = torch.ones(self.vocab, dtype=torch.bool)
        if self.masked:
            bits = [0x0F0F0F0F >> bit & 1 for bit in range(32)]
            allowed[:32] = torch.tensor(bits).bool()[: self.vocab]
        leaf = products.double().requires_grad_()

        def levels() -> Tensor:
            scaled = leaf / self.rule.divisor
            return (self.cap * torch.tanh(scaled / self.cap) if self.cap else scaled) / 0.7

        masked = torch.where((masks[0] == 0)[:, None] & ~allowed, -math.inf, levels())
        # a masked target keeps its own gradient, as in `head_gradients`
        total = masked.logsumexp(-1)
        own_rows = torch.arange(self.n).repeat_interleave(starts.diff())
        value = (gradients.double() * (levels()[own_rows, targets] - total[own_rows])).sum()
        require_near(results[0], torch.autograd.grad(value, leaf)[0], torch.float32)


@dataclass(frozen=True)
class Sums:
    n: int
    columns: int
    ids: int
    dtype: torch.dtype
    seed: int

    def inputs(self) -> tuple[Tensor, Tensor]:
        return numbers(self.seed, self.n, self.columns), torch.arange(self.n) * 3 % self.ids

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        rows, ids = (each.to(side.device) for each in self.inputs())
        by_id = torch.ones(self.ids, self.columns, device=side.device)
        total = torch.ones(self.columns, device=side.device)
        side.add_rows(rows, ids, by_id, 0.5)
        side.add_columns(rows, total)
        return [by_id, total]

    def require(self, results: Sequence[Tensor]) -> None:
        rows, ids = self.inputs()
        ones = torch.ones(self.ids, self.columns).double()
        require_near(results[0], ones.index_add_(0, ids, 0.5 * rows.double()), torch.float32)
        require_near(results[1], 1 + rows.double().sum(0), torch.float32)


@dataclass(frozen=True)
class Routes:
    n: int
    count: int
    scores: Any
    renormalized: bool
    floor: float
    shared: Any
    dtype: torch.dtype
    seed: int

    @property
    def shape(self) -> RouteShape:
        routing = Routing(3, self.renormalized, self.scores, 2.5, self.floor)
        return RouteShape(self.count, routing, self.shared)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        logits = 2 * numbers(self.seed, self.n, self.count + (self.shared == "gated"))
        ids = numbers(self.seed + 1, self.n, self.count).topk(3).indices.sort().values
        return logits, ids.contiguous(), numbers(self.seed + 2, self.n, self.shape.num_weights)

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        logits, ids, d_weights = (each.to(side.device) for each in self.inputs())
        weights = side.route_weights(logits, ids, self.shape)
        return [weights, side.route_gradient(logits, ids, self.shape, d_weights)]

    def require(self, results: Sequence[Tensor]) -> None:
        logits, ids, d_weights = self.inputs()
        leaf = logits.double().requires_grad_()
        of_experts = leaf[:, : self.count]
        odds = of_experts.softmax(-1) if self.scores == "softmax" else of_experts.sigmoid()
        exact = odds.gather(1, ids)
        if self.renormalized:
            exact = exact / exact.sum(-1, keepdim=True).clamp(min=self.floor)
        exact = exact * 2.5
        if self.shared != "none":
            gate = leaf[:, self.count :].sigmoid()
            lone = gate if self.shared == "gated" else torch.ones(self.n, 1).double()
            exact = torch.cat((exact, lone), dim=1)
        require_near(results[0], exact.detach(), torch.float32)
        (expected,) = torch.autograd.grad(exact, leaf, d_weights.double())
        require_near(results[1], expected, torch.float32)


@dataclass(frozen=True)
class RowProducts:
    n: int
    columns: int
    dtype: torch.dtype
    seed: int

    def inputs(self) -> tuple[Tensor, Tensor]:
        return numbers(self.seed, self.n, self.columns), numbers(
            self.seed + 1, self.n, self.columns
        )

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        return [side.row_products(*(each.to(side.device) for each in self.inputs()))]

    def require(self, results: Sequence[Tensor]) -> None:
        a, b = (each.double() for each in self.inputs())
        error = (results[0] - (a * b).sum(1)).abs()
        assert bool((error <= 1e-6 * (a * b).abs().sum(1)).all())


@dataclass(frozen=True)
class Experts:
    """Products of rows with `per_row` experts each, among the first `used` of all."""

    n: int
    count: int
    used: int
    per_row: int
    rows: int
    columns: int
    has_bias: bool
    dtype: torch.dtype
    seed: int

    def ids(self) -> Tensor:
        used = max(self.per_row, min(self.used, self.count))
        return numbers(self.seed, self.n, used).topk(self.per_row).indices.sort().values

    def inputs(self) -> tuple[Tensor, ...]:
        """Return rows, stack, bias, gradients by flattened ids, weights of choices, and totals."""
        stack, choices = self.count * self.rows, self.n * self.per_row
        return (
            numbers(self.seed + 1, self.n, self.columns, dtype=self.dtype),
            numbers(self.seed + 2, stack, self.columns, dtype=self.dtype),
            numbers(self.seed + 3, stack, dtype=self.dtype),
            numbers(self.seed + 4, choices, self.rows),
            numbers(self.seed + 5, self.n, self.per_row + 1),
            numbers(self.seed + 6, stack, self.columns),
            numbers(self.seed + 7, stack),
        )

    def run(self, side: GradientOps) -> Sequence[Tensor]:
        return self.results(side, self.ids(), self.inputs())

    def results(self, side: GradientOps, ids: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return results by flattened ids, sums of rows, and totals."""
        x, stack, bias, d_out, factors, *totals = (each.to(side.device) for each in inputs)
        choices = side.choices(ids.to(side.device).contiguous(), self.count)
        inputs_of = x[choices.rows].contiguous()
        bias = bias if self.has_bias else None
        weights = side.packed_experts(stack, self.count)
        out = side.expert_products(inputs_of, weights, choices, bias)
        d_sorted = d_out[choices.order].contiguous()
        turned = side.packed_experts_turned(stack, self.count)
        d_inputs = side.expert_products(side.rounded(d_sorted), turned, choices)
        total, total_bias = (each.clone() for each in totals)
        side.add_expert_outers(d_sorted, inputs_of, choices, total)
        side.add_expert_columns(d_sorted, choices, total_bias)
        weighed = side.sum_experts(out, choices, factors)
        d_x = side.sum_experts(d_inputs, choices, None)
        places = choices.order.argsort()
        return [out[places], d_inputs[places], weighed, d_x, total, total_bias]

    def require(self, results: Sequence[Tensor]) -> None:
        x, stack, bias, d_out, factors, *totals = (each.double() for each in self.inputs())
        ids, rounded = self.ids().flatten(), d_out.to(self.dtype).double()
        x = x.repeat_interleave(self.per_row, dim=0)
        out, d_inputs = d_out.new_empty(d_out.shape), x.new_empty(x.shape)
        outers, columns = (each.view(self.count, self.rows, -1) for each in totals)
        for expert, matrix in enumerate(stack.chunk(self.count)):
            part = bias.chunk(self.count)[expert] if self.has_bias else 0
            here = ids == expert
            out[here] = x[here] @ matrix.T + part
            d_inputs[here] = rounded[here] @ matrix
            outers[expert] += rounded[here].T @ x[here]
            columns[expert, :, 0] += d_out[here].sum(0)
        by_row, d_by_row = (each.unflatten(0, (self.n, -1)) for each in (out, d_inputs))
        weighed = (by_row * factors[:, : self.per_row, None]).sum(1)
        exact = out, d_inputs, weighed, d_by_row.sum(1), *totals
        for actual, value in zip(results, exact, strict=True):
            require_near(actual, value, torch.float32)


def cases(dtypes: SearchStrategy[torch.dtype], most: int = 90) -> dict[str, SearchStrategy[Any]]:
    """Return strategies of cases of up to `most` rows by the operation that they are about."""
    counts, seeds, flags = st.integers(1, most), st.integers(0, 9), st.booleans()
    wide, caps = st.integers(1, 90), st.sampled_from([0.0, 2.0])
    lengths = st.lists(st.sampled_from([1, 3, 20, 65, most + 40]), min_size=1, max_size=4)
    trees = lengths.flatmap(
        lambda drawn: st.tuples(
            st.just(tuple(drawn)), st.tuples(*(st.integers(0, 300) for _ in drawn))
        )
    )
    return {
        "products": st.builds(Products, counts, wide, wide, flags, dtypes, seeds),
        "norm": st.builds(
            Norms, counts, st.integers(1, 3), st.integers(1, 70), flags, flags, dtypes, seeds
        ),
        "gate": st.builds(
            Gates,
            st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"]),
            *(counts, wide, dtypes, seeds),
        ),
        "rotation": st.builds(
            Rotations,
            *(counts, st.integers(1, 40), flags, flags, st.sampled_from([0, 2])),
            *(flags, dtypes, seeds),
        ),
        "attention": trees.flatmap(
            lambda tree: st.builds(
                Attentions,
                *(st.just(tree[0]), st.just(tree[1]), st.sampled_from([4, 16, 32, 64])),
                st.sampled_from([(4, 2), (2, 2), (6, 2), (5, 1)]),
                *(st.sampled_from([0, 1, 20, 100]), caps, flags, dtypes, seeds),
            )
        ),
        "logit": st.builds(
            Logits,
            *(st.integers(1, 20), st.sampled_from([1, 31, 385, 1100, 4100])),
            *(st.sampled_from([0.0, 5.0]), flags, dtypes, seeds),
        ),
        "route": st.builds(
            Routes,
            *(st.integers(1, 40), st.sampled_from([4, 17, 60])),
            *(st.sampled_from(["softmax", "sigmoid"]), flags, st.sampled_from([0.0, 1e-20, 0.9])),
            *(st.sampled_from(["none", "plain", "gated"]), dtypes, seeds),
        ),
        "row products": st.builds(RowProducts, counts, wide, dtypes, seeds),
        "experts": st.builds(
            Experts,
            *(counts, st.integers(3, 9), st.integers(1, 9), st.integers(1, 3), wide, wide),
            *(flags, dtypes, seeds),
        ),
        "sums": st.builds(Sums, counts, wide, st.sampled_from([1, 5, 200]), dtypes, seeds),
    }
