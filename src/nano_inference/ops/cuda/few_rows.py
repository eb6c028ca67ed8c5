"""`FewRows`: the operations of a trunk for a few rows, several of them fused into one kernel.

A decode step of a small model is a chain of kernels that take a few microseconds each, and wait for
each other about as long. Norms and products are therefore not computed at their call, but when
their reader is known:

    norm, product                     one kernel (q, k and v)
    product, addition to the residual one kernel (o, down)
    norm, product, gate               one kernel (gate and up)

A layer takes six kernels instead of nine. The plain kernels compute everything else: norms after a
block, norms in float32, and more than `FEW_ROWS` rows. As with `ops/cpu/recorder.py`, the decoder's
code is unaware of the fusion.

The kernels are products of a few rows, preceded by the norm and followed by the gate or the
addition to the residual stream.

The cost of such a product is reading the weight, provided that enough of it is in flight at any
time: about 2.25 MB on an H100. A program therefore takes so few rows of the weight that there are
two programs per SM. It requests its first tile before it reads anything that the previous kernel
has written. Every program recomputes the norm from the float32 residual stream in the L2 cache: a
row is a few kB, and one kernel less saves a microsecond.

There are two ways to multiply, by the number of rows:

- Up to `VECTOR_ROWS`: multiply and add in float32, without tensor cores. A thread holds some k of
  all the program's rows of the weight, so that each conversion of x serves all of them. A bfloat16
  weight costs its conversion, and a multiplication and an addition for each row of x. For the 0.44
  G weights of Qwen3-0.6B's layers and 2 rows, that is 2.2 G operations. They take 0.08 ms of an
  H100, compared to 0.29 ms for reading the weights.
- Up to 8: tensor cores, with rows padded to 16. The first way would need 8 sums across threads for
  each row of a weight, five shuffles per warp. For gate and up of that model, these 1.0 M warp
  shuffles would take 4.4 µs at one per cycle and SM, compared to 4.2 µs for reading. The sums would
  also use all registers. Tensor cores need no shuffles. One tile of the weight is in flight before
  the norm.

On sm_90 and later, kernels can overlap (`rows.overlapping`): a kernel starts while its predecessor
runs, requests its first tile of the weight, and then waits until the predecessor has ended. Only
the weight is requested before the wait, and a step writes no weight.

Weights in FP8 are decoded in registers, and `few_whole_rows.py` multiplies by weights in int8.

Rounding matches the plain operations: the normed row to the norm's dtype, the float32 sum of a
product with its bias to the weight's dtype, then gate or addition. The cut of a plain weight
depends only on its shape and dtype. That of a weight in FP8 also depends on whether there is more
than one row, as does the norm before a weight in int8.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnreachable=false, reportAttributeAccessIssue=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda import few_row_tiles as tiles
from nano_inference.ops.cuda.codes import PLAIN, decoded, scale_of
from nano_inference.ops.cuda.few_row_tiles import (
    ADD,
    GATE,
    PADDED,
    STORE,
    columns_of_program,
    finish_rows,
    normed_part,
)
from nano_inference.ops.cuda.few_whole_rows import (
    DEFAULT,
    End,
    Launch,
    launch_whole,
    rounds_input,
)
from nano_inference.ops.cuda.matmul import parts_of_weight, shared_memory
from nano_inference.ops.cuda.quantised import AlignedWeight
from nano_inference.ops.cuda.rows import ACTIVATIONS, DTYPES, aligned, overlapping
from nano_inference.ops.formats import FP8
from nano_inference.ops.interface import (
    FEW_ROWS,
    AttentionArgs,
    Joint,
    KvcacheView,
    LatentOps,
    LatentWeights,
    Operations,
    Ops,
    RopeArgs,
    Trunk,
    Weight,
)
from nano_inference.ops.lora import Adapted
from nano_inference.ops.moe import Exchange, Experts, Note
from nano_inference.ops.reference.quantised import QuantisedWeight
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.state import DeltaWeights, ShortConvWeights, StateView


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """A deferred norm of the residual stream."""

    residual: Tensor  # float32 [N, H]; never modified
    norm: Norm


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A deferred product."""

    x: Tensor
    norm: Norm | None  # norm of x, if x is the residual stream
    weight: Tensor | QuantisedWeight
    bias: Tensor | None


Value = Tensor | Normed | Product


class FewRows:
    """The calls of `Ops` that a trunk makes, on tensors and on deferred values.

    Args:
        ops: The plain operations. If they are schedule-invariant, so are these: only products of
            weights in int8 are fused, and no norm is.
        overlaps: True to start each product while its predecessor runs.
    """

    def __init__(self, ops: Ops, *, overlaps: bool = False) -> None:
        self._ops, self._how = ops, Launch(overlaps, norms=not ops.schedule_invariant)
        self._normed: tuple[Normed, Tensor] | None = None  # the last norm that was computed
        self.embed, self.plan_attention = ops.embed, ops.plan_attention
        self.latent = LatentOps[Value](self._store_latents, self._latent_values)

    def made(self, value: Value) -> Tensor:
        """Compute the value as a tensor."""
        if isinstance(value, Normed):
            if self._normed is None or self._normed[0] is not value:
                normed = self._ops.rms_norm(None, value.residual, value.norm, 1.0)[0]
                self._normed = value, normed
            return self._normed[1]
        if isinstance(value, Product):
            return product(value.x, value.norm, value.weight, value.bias, self._how)
        return value

    def rms_norm(
        self, x: Value | None, residual: Value, norm: Norm, scale: float = 1.0
    ) -> tuple[Value, Tensor]:
        """Implement `Ops.rms_norm`. The norm is deferred to its reader, and a deferred product is
        added as it is computed.
        """
        stream = self.made(residual)
        if len(stream) > FEW_ROWS:
            return self._ops.rms_norm(None if x is None else self.made(x), stream, norm, scale)
        if isinstance(x, Product):
            stream = product_added(x.x, x.norm, x.weight, x.bias, stream, scale, self._how)
        elif x is not None:
            return self._ops.rms_norm(self.made(x), stream, norm, scale)
        return Normed(stream, norm), stream

    def linear(
        self,
        x: Value,
        weight: Weight,
        bias: Tensor | None = None,
        segments: tuple[int, ...] | None = None,
    ) -> Value:
        """Implement `Ops.linear`, deferred if possible."""
        # one rank's part of a sum is not rounded
        if segments is not None or not self._fuses(weight):
            return self._ops.linear(self.made(x), weight, bias, segments)
        if isinstance(x, Normed) and x.norm.dtype == weight.dtype and self._norms(x.residual):
            return Product(x.residual, x.norm, weight, bias)
        rows = self.made(x)
        if len(rows) > FEW_ROWS:
            return self._ops.linear(rows, weight, bias)
        if not rounds_input(weight):
            rows = rows.to(weight.dtype)
        return Product(rows, None, weight, bias)

    def _norms(self, residual: Tensor) -> bool:
        """Return True if products of these rows compute their norm, or codes of it."""
        least = 1 if self._how.norms else tiles.VECTOR_ROWS + 1
        return least <= len(residual) <= FEW_ROWS

    def _fuses(self, weight: Weight) -> TypeGuard[Tensor | QuantisedWeight]:
        """Return True if products of a weight can be deferred."""
        if isinstance(weight, Tensor):
            return not self._ops.schedule_invariant
        if self._ops.schedule_invariant:
            return rounds_input(weight)
        return isinstance(weight, AlignedWeight) and (rounds_input(weight) or weight.form == FP8)

    def gate(self, x: Value, activation: str = "silu") -> Tensor:
        if isinstance(x, Product):
            return product_gated(x.x, x.norm, x.weight, x.bias, activation, self._how)
        return self._ops.gate(self.made(x), activation)

    def moe(
        self,
        x: Value,
        experts: Experts,
        exchange: Exchange | None = None,
        note: Note | None = None,
        routed: Value | None = None,
    ) -> Tensor:
        read = None if routed is None else self.made(routed)
        return self._ops.moe(self.made(x), experts, exchange, note, read)

    def rope_and_store(
        self,
        qkv: Value,
        rope: RopeArgs,
        positions: Tensor,
        slot_mapping: Tensor,
        view: KvcacheView,
        layer: int,
    ) -> Tensor:
        rows = self.made(qkv)
        return self._ops.rope_and_store(rows, rope, positions, slot_mapping, view, layer)

    def call(
        self,
        batch: ForwardBatch,
        function: Joint,
        inputs: Sequence[Value],
        columns: int,
        dtype: torch.dtype,
    ) -> Tensor:
        made = [self.made(value) for value in inputs]
        return self._ops.call(batch, function, made, columns, dtype)

    def columns(self, x: Value, start: int, stop: int) -> Tensor:
        return self._ops.columns(self.made(x), start, stop)

    def attention(
        self, q: Value, view: KvcacheView, layer: int, plan: object, scores: AttentionArgs
    ) -> Tensor:
        return self._ops.attention(self.made(q), view, layer, plan, scores)

    def short_conv(
        self,
        projected: Value,
        weights: ShortConvWeights,
        batch: ForwardBatch,
        view: StateView,
        layer: int,
    ) -> Tensor:
        return self._ops.short_conv(self.made(projected), weights, batch, view, layer)

    def delta_net(
        self,
        projected: Value,
        weights: DeltaWeights,
        batch: ForwardBatch,
        view: StateView,
        layer: int,
    ) -> Tensor:
        return self._ops.delta_net(self.made(projected), weights, batch, view, layer)

    def sigmoid_gate(self, x: Value, gate: Value) -> Tensor:
        return self._ops.sigmoid_gate(self.made(x), self.made(gate))

    def lora(self, y: Value, x: Value, name: str, rows: Adapted) -> Tensor:
        return self._ops.lora(self.made(y), self.made(x), name, rows)

    def _store_latents(
        self,
        q: Value,
        c: Value,
        weights: LatentWeights,
        rope: RopeArgs,
        positions: Tensor,
        slot_mapping: Tensor,
        view: KvcacheView,
        layer: int,
    ) -> Tensor:
        where = positions, slot_mapping, view, layer
        return self._ops.latent.store(self.made(q), self.made(c), weights, rope, *where)

    def _latent_values(self, attended: Value, weights: LatentWeights) -> Tensor:
        return self._ops.latent.values(self.made(attended), weights)


def few_rows(
    ops: Ops, trunk: Trunk, batch: ForwardBatch, view: KvcacheView, *, overlaps: bool = False
) -> Tensor:
    """Implement `Ops.few_rows`: return the result of `trunk(ops, batch, view)`."""
    fused = FewRows(ops, overlaps=overlaps)
    return fused.made(trunk(cast("Operations[Value]", fused), batch, view))


VECTOR_TILE = 32 * 1024  # bytes of the weight that a program requests at a time
SUMS_BYTES = 16 * 1024  # shared memory reserved for sums across threads


def product(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    how: Launch = DEFAULT,
) -> Tensor:
    """Compute x @ weight.T (+ bias) -> [N, M] with x normed first if there is a norm, in the
    weight's dtype, or in float32 for weights in 8 bits.
    """
    dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
    out = torch.empty((len(x), weight.shape[0]), dtype=dtype, device=weight.device)
    _launch(x, norm, weight, bias, out, STORE.value, how=how)
    return out


def product_added(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    residual: Tensor,
    scale: float,
    how: Launch = DEFAULT,
) -> Tensor:
    """Return the residual stream [N, M] plus scale * `product`, as a new tensor."""
    added = torch.empty(residual.shape, dtype=torch.float32, device=weight.device)
    residual = aligned(residual)
    _launch(x, norm, weight, bias, added, ADD.value, residual=residual, scale=scale, how=how)
    return added


def product_gated(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    activation: str,
    how: Launch = DEFAULT,
) -> Tensor:
    """Return `gate` of `product`, [N, M / 2], in the weight's dtype."""
    shape = (len(x), weight.shape[0] // 2)
    out = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    code = ACTIVATIONS[activation]
    _launch(x, norm, weight, bias, out, GATE.value, activation=code, how=how)
    return out


def _launch(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    out: Tensor,
    finish: int,
    *,
    residual: Tensor | None = None,
    scale: float = 1.0,
    activation: int = 0,
    how: Launch = DEFAULT,
) -> None:
    """Launch a product. `x` is in the weight's dtype without a norm, otherwise the float32
    residual stream. Weights in int8 take other dtypes too.
    """
    end = End(finish, bias, residual, scale, activation, out)
    if rounds_input(weight):
        launch_whole(x, norm, weight, end, how)
        return
    numbers, scales, codes = parts_of_weight(weight)
    rows, (num_columns, depth) = len(x), weight.shape
    norm_weight = None if norm is None or norm.weight is None else aligned(norm.weight)
    eps, offset = (0.0, 0.0) if norm is None else (norm.eps, norm.offset)
    itemsize = numbers.element_size()
    dtype = DTYPES[weight.dtype]
    result = dtype if isinstance(weight, Tensor) else tl.float32
    if bias is not None and not isinstance(weight, Tensor):
        bias = bias.to(weight.dtype)
    overlaps = how.overlaps
    options = {"enable_fp_fusion": False} | overlapping(overlaps)
    if rows <= tiles.VECTOR_ROWS:
        columns = tiles.columns_of_vector(num_columns, depth * itemsize)
        loaded = max(8, 16 // itemsize)  # numbers that a thread loads at a time
        width, most = triton.next_power_of_2(depth), VECTOR_TILE // (columns * itemsize)
        if itemsize == 1:  # decoded codes take more registers, and so do a second tile and row
            most //= 4 if rows > 1 and 2 * width > most else 2
        width = max(min(width, most), loaded)
        _vector_kernel[(triton.cdiv(num_columns, columns),)](
            aligned(x), norm_weight, numbers, scales, bias, residual, out, eps, offset, scale,
            num_columns, numbers.stride(0), depth, rows, finish, activation, dtype, result, codes,
            columns, width // loaded, loaded, triton.next_power_of_2(depth), overlaps,
            num_warps=4 if width >= depth else 8, **options,
        )  # fmt: skip
    else:
        columns = 16 if num_columns <= 2048 else 32
        width = min(max(triton.next_power_of_2(depth), 16), 512 // weight.dtype.itemsize)
        stages = _num_stages(width, columns, x, numbers)
        _tensor_kernel[(triton.cdiv(num_columns, columns),)](
            aligned(x), norm_weight, numbers, scales, bias, residual, out, rows, eps, offset, scale,
            num_columns, numbers.stride(0), depth, finish, activation, dtype, result, codes,
            columns, width,
            "ieee" if weight.dtype == torch.float32 else "tf32",  # only used for float32
            overlaps or norm_weight is not None, overlaps,
            num_warps=columns // 8, num_stages=stages, **options,
        )  # fmt: skip


def _num_stages(width: int, columns: int, x: Tensor, weight: Tensor) -> int:
    """Return the number of tiles of x and of the weight in flight: as many as fit. For wide
    tiles: as many as leave room for a second program.
    """
    stage = width * (PADDED.value * x.element_size() + columns * weight.element_size())
    memory = shared_memory(weight.device) - SUMS_BYTES
    return max(2, min(6, 1 + (memory // 2 if columns > 16 else memory) // stage))


@triton.jit
def _scaled(sums, scales, columns, column_mask, weight_stride, CODES: tl.constexpr):
    """Multiply sums [rows, COLUMNS] by the scales of FP8 codes."""
    if CODES != PLAIN:
        at = columns.to(tl.int64) * (weight_stride // 4)
        scale = tl.load(scales + at, mask=column_mask, other=0.0)
        sums *= scale_of(scale, CODES)[None, :]
    return sums


@triton.jit
def _factor(x, eps, K: tl.constexpr, BLOCK: tl.constexpr):
    """Return 1 / rms of a row."""
    places = tl.arange(0, BLOCK)
    row = tl.load(x + places, mask=places < K, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(row * row, axis=0) / K + eps)


@triton.jit
def _vector_kernel(
    x, norm_weight, weight, scales, bias, residual, out, eps, offset, scale,
    num_columns, weight_stride, K: tl.constexpr, ROWS: tl.constexpr, FINISH: tl.constexpr,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, RESULT: tl.constexpr, CODES: tl.constexpr,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply without tensor cores. Grid (tiles of the weight's rows,). A tile of the weight is
    [COLUMNS, GROUPS, EACH]: a thread loads EACH numbers at a time.
    """
    if OVERLAPS:  # the next kernel starts once all programs of this one have started
        tl.extra.cuda.gdc_launch_dependents()
    columns, column_mask = columns_of_program(num_columns, FINISH, COLUMNS)
    ks = tl.arange(0, GROUPS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    start = weight + columns.to(tl.int64)[:, None, None] * weight_stride + ks[None, :, :]
    ours = column_mask[:, None, None]
    tile = tl.load(start, mask=ours & (ks < K)[None, :, :], other=0)
    # keep the load in flight during the norm: otherwise the assembler would move it after the norm
    tl.debug_barrier()
    if OVERLAPS:  # before the first read of another kernel's output, and the first write
        tl.extra.cuda.gdc_wait()

    first_factor, second_factor = 1.0, 1.0
    if norm_weight is not None:
        first_factor = _factor(x, eps, K, BLOCK)
        if ROWS == 2:
            second_factor = _factor(x + K, eps, K, BLOCK)
    first = tl.zeros((COLUMNS, GROUPS), tl.float32)
    second = tl.zeros((COLUMNS, GROUPS), tl.float32)
    for k in range(0, K, GROUPS * EACH):
        following = tile
        if GROUPS * EACH < K:
            following = tl.load(
                start + (k + GROUPS * EACH),
                mask=ours & (ks < K - k - GROUPS * EACH)[None, :, :],
                other=0,
            )
        factors = decoded(tile, tl.float32, CODES)
        inside = ks < K - k
        norm_part = norm_weight
        if norm_weight is not None:
            norm_part = norm_weight + k + ks
        part = tl.load(x + k + ks, mask=inside, other=0.0).to(tl.float32)
        part = normed_part(part, first_factor, norm_part, offset, inside, DTYPE)
        first += tl.sum(factors * part[None, :, :], axis=2)
        if ROWS == 2:
            part = tl.load(x + K + k + ks, mask=inside, other=0.0).to(tl.float32)
            part = normed_part(part, second_factor, norm_part, offset, inside, DTYPE)
            second += tl.sum(factors * part[None, :, :], axis=2)
        tile = following

    row = tl.arange(0, 1)
    sums = _scaled(
        tl.sum(first, axis=1)[None, :], scales, columns, column_mask, weight_stride, CODES
    )
    finish_rows(
        sums, row, row == 0, columns, column_mask, bias, residual, out, scale, num_columns,
        FINISH, ACTIVATION, RESULT, 1, COLUMNS,
    )  # fmt: skip
    if ROWS == 2:
        sums = tl.sum(second, axis=1)[None, :]
        sums = _scaled(sums, scales, columns, column_mask, weight_stride, CODES)
        finish_rows(
            sums, row + 1, row == 0, columns, column_mask, bias, residual, out, scale, num_columns,
            FINISH, ACTIVATION, RESULT, 1, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _tensor_kernel(
    x, norm_weight, weight, scales, bias, residual, out, num_rows, eps, offset, scale,
    num_columns, weight_stride, K: tl.constexpr, FINISH: tl.constexpr, ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr, RESULT: tl.constexpr, CODES: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply on tensor cores. Grid (tiles of the weight's rows,). If AHEAD, request the first
    tile of the weight before anything else. There is no norm without it.
    """
    if OVERLAPS:  # as in `_vector_kernel`
        tl.extra.cuda.gdc_launch_dependents()
    columns, column_mask = columns_of_program(num_columns, FINISH, COLUMNS)
    rows = tl.arange(0, PADDED)
    row_mask = rows < num_rows
    ks = tl.arange(0, DEPTH)
    x_start = x + rows[:, None] * K + ks[None, :]
    weight_start = weight + columns.to(tl.int64)[None, :] * weight_stride + ks[:, None]

    factor = tl.full((PADDED, 1), 1.0, tl.float32)
    sums = tl.zeros((PADDED, COLUMNS), tl.float32)
    if AHEAD:
        tile = tl.load(weight_start, mask=column_mask[None, :] & (ks < K)[:, None], other=0)
        tl.debug_barrier()  # as in `_vector_kernel`
        if OVERLAPS:
            tl.extra.cuda.gdc_wait()
        first_norm = norm_weight
        if norm_weight is not None:
            first_norm = norm_weight + ks[None, :]
            squares = tl.zeros((PADDED, DEPTH), tl.float32)
            for k in tl.range(0, K, DEPTH, num_stages=4):  # pyright: ignore[reportGeneralTypeIssues]
                part = tl.load(
                    x_start + k, mask=row_mask[:, None] & (ks < K - k)[None, :], other=0.0
                )
                squares += part * part
            factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
        part = tl.load(x_start, mask=row_mask[:, None] & (ks < K)[None, :], other=0.0)
        part = normed_part(
            part.to(tl.float32), factor, first_norm, offset, (ks < K)[None, :], DTYPE
        ).to(DTYPE)
        sums = tl.dot(part, decoded(tile, DTYPE, CODES), sums, input_precision=PRECISION)
    for k in range(DEPTH if AHEAD else 0, K, DEPTH):
        inside = (ks < K - k)[None, :]
        part = tl.load(x_start + k, mask=row_mask[:, None] & inside, other=0.0).to(tl.float32)
        norm_part = norm_weight
        if norm_weight is not None:
            norm_part = norm_weight + k + ks[None, :]
        part = normed_part(part, factor, norm_part, offset, inside, DTYPE).to(DTYPE)
        tile = tl.load(weight_start + k, mask=column_mask[None, :] & (ks < K - k)[:, None], other=0)
        sums = tl.dot(part, decoded(tile, DTYPE, CODES), sums, input_precision=PRECISION)
    sums = _scaled(sums, scales, columns, column_mask, weight_stride, CODES)
    finish_rows(
        sums, rows, row_mask, columns, column_mask, bias, residual, out, scale, num_columns,
        FINISH, ACTIVATION, RESULT, PADDED, COLUMNS,
    )  # fmt: skip
