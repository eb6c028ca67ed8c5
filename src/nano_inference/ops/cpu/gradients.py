"""The backward pass's operations: kernels/gradients.h on tensors.

They implement `GradientOps`, with products of bfloat16 or float32. No bit depends on the number of
threads or on the instruction set.
"""

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from nano_inference.arrays import (
    Device,
    Dtype,
    Tensor,
    dtype_for,
    dtype_name,
    has_dtype,
    namespace,
    torch_cpu,
)
from nano_inference.ops.cpu.library import struct
from nano_inference.ops.cpu.operations import GATES, NormWeight
from nano_inference.ops.cpu.weights import DTYPES, LANES
from nano_inference.ops.gradients import (
    Attended,
    AttentionRule,
    Choices,
    HeadShape,
    LogitRule,
    Packed,
    PathRows,
    Rotary,
    Rotated,
    RouteShape,
)
from nano_inference.ops.rowwise import Norm

GradientProduct, RotatedHeads = struct("GradientProduct"), struct("RotatedHeads")
NormGradient, AttentionGradient = struct("NormGradient"), struct("AttentionGradient")
LogitGradient, AdamStep = struct("LogitGradient"), struct("AdamStep")
RouteGradient = struct("RouteGradient")
SPARE = 16  # numbers between rows of a turned matrix, as in kernels/gradient_attention.cpp
MAX_HEAD_DIM = 576  # as in kernels/kv_store.h
_BLOCK = 4096  # numbers of a sum of squares, as in kernels/adamw.cpp


class AdamRule(NamedTuple):
    """Numbers of a step of AdamW, with the bias corrections of the step's number. `factor` is the
    gradient's.
    """

    decay: float
    mean_share: float
    square_decay: float
    square_share: float
    step_size: float
    root_divisor: float
    eps: float
    factor: float


class Group(NamedTuple):
    """An expert with rows, and its choices."""

    expert: int
    choices: slice


class GradientKernels:
    """`GradientOps` on `num_threads` threads."""

    copies_weights = True  # into panels
    # Sums over 49,152 words would lose digits: in float32, the gradient of a norm near the head
    # would be off by 7e-4 of its length.
    most_added = 4096
    most_logits = 2**24

    def __init__(self, kernels: ctypes.CDLL, dtype: Dtype, num_threads: int) -> None:
        if dtype_name(dtype) not in DTYPES:
            raise ValueError(f"products read {' or '.join(DTYPES)}; got {dtype}.")
        self.kernels, self.dtype, self.num_threads = kernels, dtype, num_threads
        self.is_bf16 = dtype_name(dtype) == "bfloat16"

    @property
    def device(self) -> Device:
        """Device of all tensors."""
        return torch_cpu()

    def exact(self) -> "GradientKernels":
        """Return the kernels for products of float32."""
        return GradientKernels(self.kernels, dtype_for(self.dtype, "float32"), self.num_threads)

    def packed(self, matrix: Tensor) -> Packed:
        """Pack a matrix [R, C] of this dtype as a weight [R, C]."""
        rows, columns = _matrix(matrix, self.dtype)
        data = self._panels(matrix, rows, columns)
        arguments = data.data_ptr(), self.is_bf16, 0, rows, columns, self.num_threads
        self.kernels.nano_pack(matrix.data_ptr(), self.is_bf16, *arguments)
        return Packed(data, rows, columns)

    def packed_turned(self, matrix: Tensor) -> Packed:
        """Pack a matrix [R, C] of this dtype as a weight [C, R]."""
        rows, columns = _matrix(matrix, self.dtype)
        data = self._panels(matrix, columns, rows)
        self.kernels.nano_pack_turned(
            *(matrix.data_ptr(), rows, columns, data.data_ptr(), self.is_bf16, self.num_threads)
        )
        return Packed(data, columns, rows)

    def product(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """Multiply rows [N, columns] of this dtype by a weight: float32 [N, rows]."""
        out = namespace(x).empty((len(x), weight.rows), dtype=namespace(x).float32)
        self._multiply(x, weight, out, bias=bias)
        return out

    def add_product(
        self, x: Tensor, weight: Packed, out: Tensor, scale: float = 1.0, bias: Tensor | None = None
    ) -> None:
        """Add `scale` times a product to `out`, float32 [N, rows]."""
        self._multiply(x, weight, out, scale, bias, adds=True)

    def add_outer(self, d_out: Tensor, x: Tensor, total: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times d_out.T @ x to a weight's gradient, float32 [R, C].

        `d_out` is float32 [N, R] and is rounded to this dtype, `x` is [N, C] of this dtype.
        """
        self._multiply(self._turned(d_out), self.packed_turned(x), total, scale, adds=True)

    def rounded(self, rows: Tensor) -> Tensor:
        """Round float32 rows to this dtype."""
        _matrix(rows, namespace(rows).float32)
        if not self.is_bf16:
            return rows
        out = namespace(rows).empty(rows.shape, dtype=self.dtype)
        self.kernels.nano_round_rows(
            *(rows.data_ptr(), rows.numel(), out.data_ptr(), self.num_threads)
        )
        return out

    def norm(self, x: Tensor, norm: Norm, dtype: Dtype | None = None) -> Tensor:
        """Implement `GradientOps.norm` by a kernel."""
        _matrix(x, namespace(x).float32)
        out = namespace(x).empty(x.shape, dtype=dtype or self.dtype)
        structure = _norm(norm)
        self.kernels.nano_norm_rows(
            *(x.data_ptr(), len(x), ctypes.addressof(structure), out.data_ptr()),
            *(has_dtype(out, "bfloat16"), self.num_threads),
        )
        return out

    def norm_gradient(
        self,
        x: Tensor,
        norm: Norm,
        d_out: Tensor,
        d_x: Tensor,
        d_weight: Tensor | None,
        *,
        adds: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Implement `GradientOps.norm_gradient` by a kernel."""
        structure = _norm(norm)
        size = structure.size
        if d_out.stride(0) != d_x.stride(0) or x.shape != d_out.shape or x.shape[1] % size:
            raise ValueError(
                f"a norm of {size} numbers does not fit inputs {tuple(x.shape)} with gradients "
                f"{tuple(d_out.shape)}."
            )
        entry = NormGradient(
            x=x.data_ptr(),
            d_out=d_out.data_ptr(),
            norm=ctypes.addressof(structure),
            d_x=d_x.data_ptr(),
            d_weight=_pointer(d_weight),
            ldx=x.stride(0),
            ldd=d_out.stride(0),
            num_rows=len(x),
            runs=x.shape[1] // size,
            adds=adds,
            num_threads=self.num_threads,
            scale=scale,
        )
        self.kernels.nano_norm_gradient(ctypes.addressof(entry))

    def rotate(
        self, rows: Tensor, shape: HeadShape, rotary: Rotary, norms: tuple[Norm | None, Norm | None]
    ) -> Rotated:
        """Implement `GradientOps.rotate` by a kernel."""
        xp, widths = namespace(rows), (shape.heads, shape.kv_heads, shape.kv_heads)
        parts = [xp.empty((len(rows), n * shape.head_dim), dtype=self.dtype) for n in widths]
        kept = [None if norm is None else _norm(norm) for norm in norms]
        entry = self._heads(rows, shape, rotary, Rotated(*parts))
        entry.rows = rows.data_ptr()
        entry.query_norm, entry.key_norm = (
            None if norm is None else ctypes.addressof(norm) for norm in kept
        )
        self.kernels.nano_rotate(ctypes.addressof(entry))
        return Rotated(*parts)

    def rotate_gradient(self, parts: Rotated, shape: HeadShape, rotary: Rotary) -> Tensor:
        """Implement `GradientOps.rotate_gradient` by a kernel."""
        xp = namespace(parts.queries)
        out = xp.empty((len(parts.queries), shape.columns), dtype=xp.float32)
        entry = self._heads(out, shape, rotary, parts)
        entry.d_rows = out.data_ptr()
        self.kernels.nano_rotate_gradient(ctypes.addressof(entry))
        return out

    def paths(self, segments: Sequence[PathRows]) -> Sequence[PathRows]:
        """Implement `GradientOps.paths`: nothing is prepared."""
        return segments

    def attend(
        self, parts: Rotated, shape: HeadShape, paths: Sequence[PathRows], rule: AttentionRule
    ) -> Attended:
        """Implement `GradientOps.attend`, segment by segment."""
        out = namespace(parts.queries).empty(parts.queries.shape, dtype=self.dtype)
        for segment in paths:
            entry = self._attention(parts, shape, segment, rule)
            entry.out = out.data_ptr()
            self.kernels.nano_attention_gradient(ctypes.addressof(entry))
        return Attended(out, None)

    def attend_gradient(
        self,
        parts: Rotated,
        shape: HeadShape,
        paths: Sequence[PathRows],
        rule: AttentionRule,
        attended: Attended,
        d_out: Tensor,
        d_sinks: Tensor | None,
    ) -> Rotated:
        """Implement `GradientOps.attend_gradient`, segment by segment in their order."""
        xp = namespace(parts.queries)
        gradients = Rotated(*(xp.zeros(part.shape, dtype=xp.float32) for part in parts))
        for segment in paths:
            entry = self._attention(parts, shape, segment, rule)
            entry.d_out, entry.d_sinks = d_out.data_ptr(), _pointer(d_sinks)
            entry.d_q, entry.d_k, entry.d_v = (each.data_ptr() for each in gradients)
            self.kernels.nano_attention_gradient(ctypes.addressof(entry))
        return gradients

    def gate(self, x: Tensor, activation: str) -> Tensor:
        """Implement `GradientOps.gate` by a kernel."""
        rows, columns = _matrix(x, namespace(x).float32)
        out = namespace(x).empty((rows, columns // 2), dtype=self.dtype)
        self.kernels.nano_gate_rows(
            *(x.data_ptr(), rows, columns // 2, GATES[activation], out.data_ptr()),
            *(self.is_bf16, self.num_threads),
        )
        return out

    def gate_gradient(self, x: Tensor, activation: str, d_out: Tensor) -> Tensor:
        """Implement `GradientOps.gate_gradient` by a kernel."""
        rows, columns = _matrix(x, namespace(x).float32)
        out = namespace(x).empty(x.shape, dtype=d_out.dtype)
        self.kernels.nano_gate_gradient(
            *(x.data_ptr(), d_out.data_ptr(), rows, columns // 2, GATES[activation]),
            *(out.data_ptr(), self.num_threads),
        )
        return out

    def add_columns(self, rows: Tensor, total: Tensor) -> None:
        """Implement `GradientOps.add_columns` by a kernel."""
        self.kernels.nano_add_columns(
            *(rows.data_ptr(), *_matrix(rows, total.dtype), total.data_ptr(), self.num_threads)
        )

    def add_rows(self, rows: Tensor, ids: Tensor, total: Tensor, scale: float = 1.0) -> None:
        """Implement `GradientOps.add_rows` by a kernel."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(total):
            raise ValueError(f"row ids are not within the {len(total)} rows of the total.")
        self.kernels.nano_add_rows(
            *(rows.data_ptr(), ids.data_ptr(), *_matrix(rows, total.dtype), scale),
            *(total.data_ptr(), self.num_threads),
        )

    def logit_gradient(
        self, logits: Tensor, targets: tuple[Tensor, Tensor, Tensor], masks: Any, rule: LogitRule
    ) -> None:
        """Implement `GradientOps.logit_gradient` by a kernel."""
        rows, vocab = _matrix(logits, namespace(logits).float32)
        mask_rows, words = masks
        first, ids, gradients = targets
        entry = LogitGradient(
            logits=logits.data_ptr(),
            first_targets=first.data_ptr(),
            targets=ids.data_ptr(),
            gradients=gradients.data_ptr(),
            mask_rows=mask_rows.data_ptr(),
            mask_words=words.data_ptr(),
            mask_width=words.shape[1] if words.numel() else 0,
            num_rows=rows,
            vocab=vocab,
            num_threads=self.num_threads,
            **rule._asdict(),
        )
        self.kernels.nano_logit_gradient(ctypes.addressof(entry))

    def route_weights(self, logits: Tensor, ids: Tensor, shape: RouteShape) -> Tensor:
        """Implement `ExpertOps.route_weights` by a kernel."""
        xp = namespace(logits)
        weights = xp.empty((len(ids), shape.num_weights), dtype=xp.float32)
        entry = self._route(logits, ids, shape)
        entry.weights = weights.data_ptr()
        self.kernels.nano_route_gradient(ctypes.addressof(entry))
        return weights

    def route_gradient(
        self, logits: Tensor, ids: Tensor, shape: RouteShape, d_weights: Tensor
    ) -> Tensor:
        """Implement `ExpertOps.route_gradient` by a kernel."""
        xp = namespace(logits)
        if not has_dtype(d_weights, "float32") or not d_weights.is_contiguous():
            raise ValueError(f"gradients must be contiguous float32; got {d_weights.dtype}.")
        d_logits = xp.empty(logits.shape, dtype=xp.float32)
        entry = self._route(logits, ids, shape)
        entry.d_weights, entry.d_logits = d_weights.data_ptr(), d_logits.data_ptr()
        self.kernels.nano_route_gradient(ctypes.addressof(entry))
        return d_logits

    def row_products(self, a: Tensor, b: Tensor) -> Tensor:
        """Implement `ExpertOps.row_products` by a kernel."""
        xp = namespace(a)
        rows, columns = _matrix(a, xp.float32)
        if _matrix(b, xp.float32) != (rows, columns):
            raise ValueError(f"rows {tuple(a.shape)} do not fit rows {tuple(b.shape)}.")
        out = xp.empty((rows,), dtype=xp.float32)
        self.kernels.nano_row_products(
            *(a.data_ptr(), b.data_ptr(), rows, columns, out.data_ptr(), self.num_threads)
        )
        return out

    def choices(self, ids: Tensor, count: int) -> Choices:
        """Implement `ExpertOps.choices`. `groups` are the bounds of experts with rows."""
        order = ids.flatten().argsort(stable=True)
        sizes = namespace(ids).bincount(ids.flatten(), minlength=count).tolist()
        ends = accumulate(sizes)
        groups = [
            Group(expert, slice(end - size, end))
            for expert, (size, end) in enumerate(zip(sizes, ends, strict=True))
            if size
        ]
        return Choices(order, ids.shape[1], groups)

    def packed_experts(self, stack: Tensor, count: int) -> list[Packed]:
        """Implement `ExpertOps.packed_experts` by a copy of each."""
        return [self.packed(one) for one in stack.chunk(count)]

    def packed_experts_turned(self, stack: Tensor, count: int) -> list[Packed]:
        """Implement `ExpertOps.packed_experts_turned` by a copy of each."""
        return [self.packed_turned(one) for one in stack.chunk(count)]

    def expert_products(
        self,
        x: Tensor,
        weights: Sequence[Packed],
        choices: Choices,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Implement `ExpertOps.expert_products`, expert by expert."""
        width = weights[0].rows
        out = namespace(x).empty((len(x), width), dtype=namespace(x).float32)
        for expert, rows in choices.groups:
            part = None if bias is None else bias[expert * width : (expert + 1) * width]
            self._multiply(x[rows], weights[expert], out[rows], bias=part)
        return out

    def add_expert_outers(self, d_out: Tensor, x: Tensor, choices: Choices, total: Tensor) -> None:
        """Implement `ExpertOps.add_expert_outers`, expert by expert."""
        height = d_out.shape[1]
        for expert, rows in choices.groups:
            part = total[expert * height : (expert + 1) * height]
            self.add_outer(d_out[rows], x[rows], part)

    def add_expert_columns(self, rows: Tensor, choices: Choices, total: Tensor) -> None:
        """Implement `ExpertOps.add_expert_columns`, expert by expert."""
        width = rows.shape[1]
        for expert, some in choices.groups:
            self.add_columns(rows[some], total[expert * width : (expert + 1) * width])

    def sum_experts(self, rows: Tensor, choices: Choices, weights: Tensor | None) -> Tensor:
        """Implement `ExpertOps.sum_experts` by `add_rows`."""
        xp = namespace(rows)
        out = xp.zeros((len(rows) // choices.per_row, rows.shape[1]), dtype=xp.float32)
        rows = rows if weights is None else rows * choices.weights_of(weights)
        self.add_rows(rows, choices.rows, out)
        return out

    def adam_step(
        self, param: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], rule: AdamRule
    ) -> None:
        """Update a parameter of this dtype and its moments in place.

        `moments` are `mean` and `square`, and `largest` for AMSGrad.
        """
        tensors = {"param": param, "gradient": gradient, **moments}
        for name, tensor in tensors.items():
            if tensor.dtype != self.dtype or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous {self.dtype}; got {tensor.dtype}.")
            if tensor.numel() != param.numel():
                raise ValueError(f"{name} has {tensor.numel()} numbers, param {param.numel()}.")
        entry = AdamStep(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            count=param.numel(),
            is_bf16=self.is_bf16,
            num_threads=self.num_threads,
            **rule._asdict(),
        )
        self.kernels.nano_adamw(ctypes.addressof(entry))

    def sum_of_squares(self, x: Tensor) -> float:
        """Return the sum of squares of a tensor of this dtype, in float64."""
        if x.dtype != self.dtype or not x.is_contiguous():
            raise ValueError(f"the tensor must be contiguous {self.dtype}; got {x.dtype}.")
        blocks = (ctypes.c_double * max(1, -(-x.numel() // _BLOCK)))()
        return self.kernels.nano_sum_of_squares(
            *(x.data_ptr(), x.numel(), self.is_bf16, blocks, self.num_threads)
        )

    def _route(self, logits: Tensor, ids: Tensor, shape: RouteShape) -> Any:
        rows, columns = _matrix(logits, namespace(logits).float32)
        routing, count = shape.routing, shape.num_experts
        if columns != count + (shape.shared == "gated") or ids.shape != (rows, routing.per_token):
            raise ValueError(
                f"logits {tuple(logits.shape)} and ids {tuple(ids.shape)} do not fit {count} "
                f"experts, {routing.per_token} per row."
            )
        if not has_dtype(ids, "int64") or not ids.is_contiguous():
            raise ValueError(f"ids must be contiguous int64; got {ids.dtype}.")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise ValueError(f"ids are not within the {count} experts.")
        return RouteGradient(
            logits=logits.data_ptr(),
            ids=ids.data_ptr(),
            num_rows=rows,
            num_experts=count,
            columns=columns,
            per_token=routing.per_token,
            sigmoid=routing.scores == "sigmoid",
            renormalized=routing.renormalized,
            shared=("none", "plain", "gated").index(shape.shared),
            num_threads=self.num_threads,
            scale=routing.scale,
            floor=routing.floor,
        )

    def _panels(self, like: Tensor, rows: int, columns: int) -> Tensor:
        padded = -(-columns // 2) * 2 if self.is_bf16 else columns
        shape = (-(-rows // LANES), padded * LANES)
        # the padding of the last panel and column must be zeros
        whole = rows % LANES == 0 and padded == columns
        make = namespace(like).empty if whole else namespace(like).zeros
        return make(shape, dtype=self.dtype)

    def _turned(self, source: Tensor) -> Tensor:
        """Return float32 [R, C] as [C, R] of this dtype, with rows SPARE numbers apart."""
        rows, columns = _matrix(source, namespace(source).float32)
        out = namespace(source).empty((columns, rows + SPARE), dtype=self.dtype)
        self.kernels.nano_turn(
            *(source.data_ptr(), rows, columns, out.data_ptr(), rows + SPARE),
            *(self.is_bf16, self.num_threads),
        )
        return out[:, :rows]

    def _multiply(
        self,
        x: Tensor,
        weight: Packed,
        out: Tensor,
        scale: float = 1.0,
        bias: Tensor | None = None,
        adds: bool = False,
    ) -> None:
        shape = (len(x), weight.rows)
        if x.shape[1] != weight.columns or tuple(out.shape) != shape or x.dtype != self.dtype:
            raise ValueError(
                f"rows {tuple(x.shape)} {x.dtype} and a weight {weight[1:]} of {self.dtype} do not "
                f"give {tuple(out.shape)}."
            )
        if x.stride(1) != 1 or out.stride(1) != 1 or not has_dtype(out, "float32"):
            raise ValueError("rows must be contiguous, and the output float32.")
        entry = GradientProduct(
            x=x.data_ptr(),
            weight=weight.data.data_ptr(),
            bias=_pointer(bias),
            out=out.data_ptr(),
            ldx=x.stride(0),
            num_rows=len(x),
            rows=weight.rows,
            columns=weight.columns,
            ldo=out.stride(0),
            adds=adds,
            is_bf16=self.is_bf16,
            num_threads=self.num_threads,
            scale=scale,
        )
        self.kernels.nano_gradient_product(ctypes.addressof(entry))

    def _heads(self, rows: Tensor, shape: HeadShape, rotary: Rotary, parts: Rotated) -> Any:
        if rows.shape[1] != shape.columns or shape.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"rows of {rows.shape[1]} numbers do not hold {shape}.")
        return RotatedHeads(
            cos=rotary.cos.data_ptr(),
            sin=rotary.sin.data_ptr(),
            query_scales=_pointer(rotary.query_scales),
            positions=rotary.positions.data_ptr(),
            queries=parts.queries.data_ptr(),
            keys=parts.keys.data_ptr(),
            values=parts.values.data_ptr(),
            num_rows=len(rows),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            turning=2 * rotary.cos.shape[1],
            interleaved=rotary.interleaved,
            is_bf16=self.is_bf16,
            num_threads=self.num_threads,
        )

    def _attention(
        self, parts: Rotated, shape: HeadShape, segment: PathRows, rule: AttentionRule
    ) -> Any:
        if parts.queries.dtype != self.dtype:
            raise ValueError(f"queries must be {self.dtype}; got {parts.queries.dtype}.")
        return AttentionGradient(
            q=parts.queries.data_ptr(),
            k=parts.keys.data_ptr(),
            v=parts.values.data_ptr(),
            path=segment.path.data_ptr(),
            sinks=_pointer(rule.sinks),
            num_rows=segment.num_rows,
            length=len(segment.path),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            window=rule.window,
            is_bf16=self.is_bf16,
            num_threads=self.num_threads,
            scale=rule.scale,
            cap=rule.cap,
        )


def _matrix(tensor: Tensor, dtype: Dtype) -> tuple[int, int]:
    """Return the shape of a contiguous matrix of a dtype. Raise `ValueError`."""
    if tensor.dim() != 2 or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"a contiguous {dtype} matrix is needed; got {tensor.dtype} {tuple(tensor.shape)}."
        )
    rows, columns = tensor.shape
    return rows, columns


def _norm(norm: Norm) -> Any:
    """Return the structure of a norm. Its pointer is valid as long as the weight lives."""
    if norm.weight is None:
        return NormWeight(None, 0, False, norm.eps, norm.offset)
    is_float, size = has_dtype(norm.weight, "float32"), len(norm.weight)
    return NormWeight(norm.weight.data_ptr(), size, is_float, norm.eps, norm.offset)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
