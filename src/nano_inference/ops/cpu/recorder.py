"""`Recorder`: runs a decoder's Python code once on numbered buffers and records its calls, which
C++ replays.

Recorded calls are to the CPU backend what a captured graph is to a GPU: the decoder is written
once, in Python, and a step takes one call. Adjacent operations are joined if this changes no bit: a
product and the gate that reads it, or a product and the addition to the residual stream.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Concatenate, cast

from nano_inference.arrays import Dtype, Tensor, dtype_for, has_dtype, namespace
from nano_inference.ops.cpu.latent import LatentWeight
from nano_inference.ops.cpu.moe import CpuMoe
from nano_inference.ops.cpu.operations import (
    ADD,
    ATTENTION,
    CALL,
    EMBED,
    GATE,
    GATES,
    LINEAR,
    LORA,
    MEET,
    NORM,
    ROPE_AND_STORE,
    STORE,
    Buffer,
    Operation,
    Segments,
    Window,
)
from nano_inference.ops.cpu.quantised import QuantisedWeight
from nano_inference.ops.cpu.state import CpuStates
from nano_inference.ops.cpu.weights import PackedWeight
from nano_inference.ops.interface import (
    AttentionArgs,
    Joint,
    KvcacheView,
    LatentOps,
    LatentWeights,
    RopeArgs,
    Weight,
)
from nano_inference.ops.moe import Exchange, Experts, Note
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.state import DeltaWeights, ShortConvWeights
from nano_inference.parallel.bounds import check_segments

PANELS = 32  # a gate's weight consists of pairs of panels, 32 rows per pair


class Recorder:
    """The operations of `Ops` on buffers. They are recorded, not computed.

    Args:
        dtype: Dtype of weights and of rows that products read.
        moe: Operation on tensors, for programs with experts.
        states: Operations on tensors, for programs that have layers with a state.
    """

    def __init__(
        self,
        dtype: Dtype,
        moe: CpuMoe | None = None,
        states: CpuStates | None = None,
    ) -> None:
        self.dtype = dtype
        self.float32 = namespace(dtype).float32
        self._moe, self._states = moe, states
        self.buffers: list[Buffer] = []
        self.operations: list[Operation] = []
        self.windows: list[Window] = []
        self.adapted: list[str] = []  # names of weights whose products adapters may add to
        self.num_positions = 0

    @property
    def latent(self) -> LatentOps[Buffer]:  # made when asked for, so that no cycle keeps weights
        return LatentOps(self._store_latents, self._latent_values)

    def new(self, columns: int, dtype: Dtype) -> Buffer:
        """Return a new buffer."""
        self.buffers.append(Buffer(len(self.buffers), columns, dtype))
        return self.buffers[-1]

    def embed(
        self,
        _input_ids: Any,
        weight: Weight,
        scale: float = 1.0,
        part: tuple[int, int] | None = None,
    ) -> Buffer:
        weight = cast("PackedWeight | QuantisedWeight", weight)
        out = self.new(weight.columns, self.float32)
        values = {"scale": scale, "rows": weight.rows, "columns": weight.columns}
        values["codes"] = weight.codes
        if part is not None:
            values |= {"first_token": part[0], "vocab": part[1]}
        self.operations.append(Operation(EMBED, (), out, weight=weight, values=values))
        return out

    def linear(
        self,
        x: Buffer,
        weight: Weight,
        bias: Tensor | None = None,
        segments: tuple[int, ...] | None = None,
    ) -> Buffer:
        """Record `Ops.linear`. The sums stay in float32."""
        weight = cast("PackedWeight | QuantisedWeight", weight)
        _require(
            x.columns == weight.columns,
            f"x has {x.columns} columns, but the weight has {weight.columns}.",
        )
        _require(
            has_dtype(x, weight.dtype),
            f"x is {x.dtype}, but the weight is {weight.dtype}.",
        )
        if bias is not None:
            _require(
                tuple(bias.shape) == (weight.rows,),
                f"bias must have shape ({weight.rows},); got {tuple(bias.shape)}.",
            )
            bias = bias.to(dtype_for(bias, weight.dtype)).contiguous()
        out = self.new(weight.rows, self.float32)
        values = {"finish": STORE, "scale": 1.0, "rows": weight.rows, "columns": weight.columns}
        values["codes"] = weight.codes
        # quantized weights have their own segments
        if segments is not None and not values["codes"]:
            check_segments(segments, weight.columns)
            _require(
                all(bound % 2 == 0 for bound in segments[:-1]),
                f"segments {segments} must begin at even columns.",
            )
            values["segments"] = Segments(len(segments) - 1, (*segments,))
        self.operations.append(
            Operation(LINEAR, (x,), out, weight=weight, bias=bias, values=values)
        )
        return out

    def lora(self, y: Buffer, x: Buffer, name: str, _batch: Any) -> Buffer:
        """Record `Ops.lora`, which adds in place."""
        _require(
            y.dtype == self.float32 and x.dtype == self.dtype,
            f"y must be float32 and x {self.dtype}; got {y.dtype} and {x.dtype}.",
        )
        self.adapted.append(name)
        values = {"plan": len(self.adapted) - 1, "columns": x.columns}
        self.operations.append(Operation(LORA, (x,), y, values=values))
        return y

    def rms_norm(
        self, x: Buffer | None, residual: Buffer, norm: Norm, scale: float = 1.0
    ) -> tuple[Buffer, Buffer]:
        """Record `Ops.rms_norm`. If x is present it is added in place: the residual stream is one
        buffer.
        """
        _require(
            residual.dtype == self.float32,
            f"the residual stream must be float32; got {residual.dtype}.",
        )
        _require(
            x is None or (x.columns == residual.columns and x.dtype == self.float32),
            "x must be float32 and as wide as the residual stream.",
        )
        out = self.new(residual.columns, norm.dtype)
        values = {"scale": scale, "columns": residual.columns, "wide": norm.dtype != self.dtype}
        norms = () if norm.weight is None else (_checked(norm, residual.columns),)
        inputs = () if x is None else (x,)
        self.operations.append(Operation(NORM, inputs, out, residual, norms=norms, values=values))
        return out, residual

    def rope_and_store(
        self,
        qkv: Buffer,
        rope: RopeArgs,
        _positions: Tensor,
        _slot_mapping: Tensor,
        _view: KvcacheView,
        layer: int,
    ) -> Buffer:
        cos, sin, query_scales = rope.cos, rope.sin, rope.query_scales
        num_heads, num_kv_heads = rope.num_heads, rope.num_kv_heads
        count = num_heads + (1 if rope.joint else 2) * num_kv_heads
        head_dim, rest = divmod(qkv.columns, count)
        _require(
            not rest and qkv.dtype == self.float32,
            f"qkv must be float32 [N, {count} * D]; got {qkv.columns} columns of {qkv.dtype}.",
        )
        _require(head_dim % 16 == 0, f"head_dim={head_dim} must be a multiple of 16.")
        for table in (cos, sin):
            _require(
                has_dtype(table, "float32")
                and table.is_contiguous()
                and table.shape == cos.shape
                and 0 < table.shape[1] * 2 <= head_dim,
                f"cos and sin must be contiguous float32 [positions, at most {head_dim // 2}].",
            )
        _require(
            query_scales is None
            or (
                has_dtype(query_scales, "float32")
                and query_scales.is_contiguous()
                and query_scales.shape == (len(cos),)
            ),
            f"query scales must be contiguous float32 [{len(cos)}].",
        )
        self.num_positions = min(len(cos), self.num_positions or len(cos))
        out = self.new(num_heads * head_dim, self.dtype)
        wide = (head_dim, num_heads * head_dim, num_kv_heads * head_dim)
        checked = tuple(norm and _checked(norm, *wide) for norm in rope.norms)
        values = {
            "layer": layer,
            "cos": cos.data_ptr(),
            "sin": sin.data_ptr(),
            "query_scales": None if query_scales is None else query_scales.data_ptr(),
            "turning": 2 * cos.shape[1],
            "interleaved": int(rope.interleaved),
            "query_heads": num_heads,
            "kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "joint": int(rope.joint),
        }
        self.operations.append(Operation(ROPE_AND_STORE, (qkv,), out, norms=checked, values=values))
        return out

    def plan_attention(self, _batch: Any, _block_size: int, window: int = 0) -> int:
        """Return the window: the C++ code plans each step itself, once per `Window`."""
        return window

    def attention(
        self,
        q: Buffer,
        view: KvcacheView,
        layer: int,
        plan: object,
        scores: AttentionArgs,
    ) -> Buffer:
        """Record `Ops.attention`. Its plan is the window."""
        window, sinks = cast("int", plan), scores.sinks
        kv_heads, _, _, row = view.lie(layer)[0].shape
        head_dim = view.format.head_dim(row)
        heads, rest = divmod(q.columns, head_dim)
        _require(
            not rest and not heads % kv_heads,
            f"queries of {q.columns} numbers do not fit the KV storage: layer {layer} has "
            f"{kv_heads} heads of {head_dim}.",
        )
        if sinks is not None:
            _require(
                sinks.shape == (heads,) and has_dtype(sinks, "float32") and sinks.is_contiguous(),
                f"sinks must be float32 ({heads},); got {sinks.dtype} {tuple(sinks.shape)}.",
            )
        shape = Window(window, scores.scale, scores.cap, heads, kv_heads, head_dim)
        if shape not in self.windows:
            self.windows.append(shape)
        out = self.new(q.columns, self.dtype)
        values = {"layer": layer, "plan": self.windows.index(shape)}
        self.operations.append(Operation(ATTENTION, (q,), out, bias=sinks, values=values))
        return out

    def _store_latents(
        self, q: Buffer, c: Buffer, weights: LatentWeights, rope: RopeArgs, *where: Any
    ) -> Buffer:
        """Record `LatentOps.store`: one product per head, a pass over the rows, and the store."""
        return self.rope_and_store(self.meet(q, c, weights), rope, *where)

    def meet(self, q: Buffer, c: Buffer, weights: LatentWeights) -> Buffer:
        """Record the queries over latents and, twice, the key: `ops.reference.backend.meet`."""
        kv, norm, sizes = weights
        assert isinstance(kv, LatentWeight)
        query = sizes.plain + sizes.rotary
        _require(
            kv.sizes == sizes and q.columns == kv.heads * query and c.columns == sizes.key,
            f"rows of {q.columns} and {c.columns} numbers do not fit {kv.heads} heads of {sizes}.",
        )
        _require(
            q.dtype == c.dtype == self.float32,
            f"q and c must be float32; got {q.dtype} and {c.dtype}.",
        )
        out = self.new((kv.heads + 2) * sizes.key, self.float32)
        steps = {"heads": kv.heads, "input_step": query, "output_step": sizes.key}
        self._by_heads(self._rounded(q), kv.keys, out, steps | {"first_output": sizes.rotary})
        values = steps | {"turning": sizes.rotary, "columns": sizes.rank}
        norms = (_checked(norm, sizes.rank),)
        self.operations.append(Operation(MEET, (c,), out, q, norms=norms, values=values))
        return out

    def _latent_values(self, attended: Buffer, weights: LatentWeights) -> Buffer:
        """Record `LatentOps.values`: one product per head."""
        kv, _, sizes = weights
        assert isinstance(kv, LatentWeight)
        _require(
            kv.sizes == sizes and attended.columns == kv.heads * sizes.key,
            f"rows of {attended.columns} numbers do not fit {kv.heads} heads of {sizes}.",
        )
        out = self.new(kv.heads * sizes.value, self.float32)
        steps = {"heads": kv.heads, "input_step": sizes.key, "output_step": sizes.value}
        latents = self.columns(attended, sizes.rotary, attended.columns)
        self._by_heads(latents, kv.values, out, steps)
        return self._rounded(out)

    def _by_heads(
        self, x: Buffer, weight: PackedWeight, out: Buffer, steps: dict[str, int]
    ) -> None:
        """Record one product per head, of some columns of x and some rows of the weight."""
        _require(
            has_dtype(x, weight.dtype),
            f"x is {x.dtype}, but the weight is {weight.dtype}.",
        )
        size = {"finish": STORE, "scale": 1.0, "rows": weight.rows, "columns": weight.columns}
        self.operations.append(Operation(LINEAR, (x,), out, weight=weight, values=size | steps))

    def _rounded(self, x: Buffer) -> Buffer:
        """Record the rounding of x to the dtype that products read."""
        return self.rms_norm(None, x, Norm(None, 0.0, 0.0, self.dtype))[0]

    def short_conv(
        self, projected: Buffer, weights: ShortConvWeights, _batch: Any, view: Any, layer: int
    ) -> Buffer:
        return self._of_states(
            lambda states, batch, rows: states.short_conv(rows, weights, batch, view, layer),
            (projected,),
            projected.columns // 3,
        )

    def delta_net(
        self, projected: Buffer, weights: DeltaWeights, _batch: Any, view: Any, layer: int
    ) -> Buffer:
        run = self._known_states().delta_layer(weights, view, layer)

        def compute(batch: Any, out: Tensor, rows: Tensor) -> None:
            run(batch, rows, out)

        return self.call(None, compute, (projected,), weights.width, self.dtype)

    def sigmoid_gate(self, x: Buffer, gate: Buffer) -> Buffer:
        return self._of_states(
            lambda states, _, rows, gates: states.sigmoid_gate(rows, gates), (x, gate), x.columns
        )

    def _known_states(self) -> CpuStates:
        if self._states is None:
            raise ValueError("this program was recorded without operations on states.")
        return self._states

    def _of_states(
        self,
        compute: Callable[Concatenate[CpuStates, Any, ...], Tensor],
        inputs: tuple[Buffer, ...],
        columns: int,
    ) -> Buffer:
        """Record a call of `compute` with the operations on states, the batch and tensors."""
        states = self._known_states()

        def run(batch: Any, out: Tensor, *rows: Tensor) -> None:
            out.copy_(compute(states, batch, *rows))

        return self.call(None, run, inputs, columns, self.dtype)

    def gate(self, x: Buffer, activation: str = "silu") -> Buffer:
        out = self.new(x.columns // 2, self.dtype)
        values = {"rows": out.columns, "finish": GATES[activation]}
        self.operations.append(Operation(GATE, (x,), out, values=values))
        return out

    def moe(
        self,
        x: Buffer,
        experts: Experts,
        exchange: Exchange | None = None,
        note: Note | None = None,
        routed: Buffer | None = None,
    ) -> Buffer:
        moe = self._moe
        if moe is None:
            raise ValueError("this program was recorded without an operation on experts.")
        layer = None if exchange is not None else moe.layer(experts)

        def compute(
            _batch: Any, out: Tensor, rows: Tensor, router_rows: Tensor | None = None
        ) -> None:
            if layer is not None:
                layer(rows, out, note, router_rows)
            else:
                out.copy_(moe(rows, experts, exchange, note, router_rows))

        inputs = (x,) if routed is None else (x, routed)
        return self.call(None, compute, inputs, x.columns, self.float32)

    def columns(self, x: Buffer, start: int, stop: int) -> Buffer:
        """Return a buffer for some columns of x. Only products read such buffers."""
        return replace(
            x, columns=stop - start, first=x.first + start, of=x.columns if x.of is None else x.of
        )

    def call(
        self,
        _batch: Any,
        function: Joint,
        inputs: Sequence[Buffer],
        columns: int,
        dtype: Dtype,
    ) -> Buffer:
        out = self.new(columns, dtype)
        self.operations.append(Operation(CALL, tuple(inputs), out, function=function))
        return out

    def joined(self) -> list[Operation]:
        """Return the operations, with adjacent ones joined if this changes no bit."""
        done: list[Operation] = []
        for operation in self.operations:
            before = done[-1] if done else None
            if (
                before is not None
                and before.kind == LINEAR
                and operation.inputs == (before.output,)
            ):
                if (
                    operation.kind == GATE
                    and before.bias is None
                    and before.weight.rows % PANELS == 0
                ):
                    values = {**before.values, "finish": operation.values["finish"]}
                    done[-1] = replace(before, output=operation.output, values=values)
                    continue
                if operation.kind == NORM and operation.residual is not None:
                    added = {**before.values, "finish": ADD, "scale": operation.values["scale"]}
                    done[-1] = replace(before, output=operation.residual, values=added)
                    operation = replace(operation, inputs=())
            done.append(operation)
        return done

    def mark_read_once(self, operations: Sequence[Operation], kept: Sequence[Buffer]) -> None:
        """Mark norms whose output is only read by the following product: each thread may then keep
        its own copy.
        """
        readers = Counter(buffer for operation in operations for buffer in operation.inputs)
        for operation, following in pairwise(operations):
            if (
                operation.kind == NORM
                and following.kind == LINEAR
                and "heads" not in following.values  # such products read a part of each row
                and following.inputs == (operation.output,)
            ):
                once = (
                    readers[operation.output] == 1
                    and operation.output not in kept
                    and not operation.values["wide"]
                )
                operation.values["read_once"] = once


def _checked(norm: Norm, *widths: int) -> Norm:
    assert norm.weight is not None
    _require(
        len(norm.weight) in widths,
        f"the norm must have {widths[0]} weights; got {len(norm.weight)}.",
    )
    return norm._replace(weight=norm.weight.contiguous())


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
