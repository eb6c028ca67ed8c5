"""The CPU backend as `Ops`: single operations on tensors, and whole decoders that are recorded and
replayed.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from nano_inference.arrays import Device, Dtype, Tensor, dtype_for, has_dtype
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cpu import library
from nano_inference.ops.cpu.build import Law, best_instruction_set, law_of
from nano_inference.ops.cpu.head import CpuHead
from nano_inference.ops.cpu.latent import LatentWeight
from nano_inference.ops.cpu.memory import Arena
from nano_inference.ops.cpu.moe import CpuMoe
from nano_inference.ops.cpu.partial import partial_attention
from nano_inference.ops.cpu.program import Program, run_once
from nano_inference.ops.cpu.quantised import CpuStack, QuantisedWeight
from nano_inference.ops.cpu.recorder import Recorder
from nano_inference.ops.cpu.state import CpuStates
from nano_inference.ops.cpu.weights import PackedWeight
from nano_inference.ops.formats import Format, Stack
from nano_inference.ops.interface import (
    AttentionArgs,
    KvcacheView,
    LatentOps,
    LatentWeights,
    Ops,
    Packing,
    RopeArgs,
    Trunk,
    call,
)
from nano_inference.ops.lora import Adapted, Place
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import Latent

LAYOUT = 3  # raised whenever the bytes of a packed weight change
VERSION = 7  # raised whenever any bit of the results may change
_MatrixPlace: Any = library.struct("MatrixPlace")


class CpuOps:
    """The operations of `Ops` on tensors, one kernel call each."""

    def __init__(self, num_threads: int, instruction_set: str | None = None) -> None:
        self.num_threads, self.has_adapters = num_threads, True
        self.sums = law_of(instruction_set or best_instruction_set())
        self.kernels = library.load(instruction_set)
        self.moe = CpuMoe(self.kernels, num_threads)
        self.states = CpuStates(self.kernels, num_threads)
        self.short_conv, self.delta_net = self.states.short_conv, self.states.delta_net
        self.sigmoid_gate = self.states.sigmoid_gate
        self.latent = LatentOps(self._store_latents, self._latent_values)
        self.arena = Arena()
        self.packing = Packing(LAYOUT, lambda arena: partial(self.allocate, arena=arena))
        self.partial = partial_attention(self.kernels, num_threads)
        head = CpuHead(self.kernels, num_threads)
        self.logits, self.head_parts = head.logits, head.head_parts
        self.sample, self.sample_logits = head.sample, head.sample_logits
        self.gather_logprobs, self.score_logits = head.gather_logprobs, head.score_logits

    def embed(
        self,
        input_ids: Tensor,
        weight: PackedWeight,
        scale: float = 1.0,
        part: tuple[int, int] | None = None,
    ) -> Tensor:
        return self._run(
            lambda r: r.embed(input_ids, weight, scale, part),
            dtype=dtype_for(input_ids, weight.dtype),
            input_ids=input_ids,
        )[0]

    call = staticmethod(call)

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None = None,
        segments: tuple[int, ...] | None = None,
    ) -> Tensor:
        return self._run(
            lambda r, x: r.linear(x, weight, bias, segments), x, dtype=dtype_for(x, weight.dtype)
        )[0]

    def lora(self, y: Tensor, x: Tensor, name: str, rows: Adapted) -> Tensor:
        added = y.clone()
        self._run(lambda r, y, x: r.lora(y, x, name, rows), added, x, dtype=x.dtype, adapted=rows)
        return added

    def placed(self, places: Sequence[Place]) -> Callable[[Sequence[Tensor]], int]:
        """Implement `Ops.placed`. Contiguous float32 matrices are read without a copy."""
        table = (_MatrixPlace * len(places))()
        for row, (out, turned) in zip(table, places, strict=True):
            rows, columns = reversed(out.shape) if turned else out.shape
            row.out, row.rows, row.columns, row.turned = out.data_ptr(), rows, columns, turned

        def write(sources: Sequence[Tensor]) -> int:
            matrices = [
                each
                if has_dtype(each, "float32") and each.is_contiguous() and each.is_cpu
                else each.to("cpu").float().contiguous()
                for each in sources
            ]
            pointers = (ctypes.c_void_p * len(table))(*(each.data_ptr() for each in matrices))
            return self.kernels.nano_place(table, pointers, len(table))

        return write

    def columns(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Implement `Ops.columns` as a copy, since kernels read whole rows."""
        return x[:, start:stop].contiguous()

    def rms_norm(
        self, x: Tensor | None, residual: Tensor, norm: Norm, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        residual = residual if x is None else residual.clone()
        x = None if x is None else x.float()
        normed = self._run(
            lambda r, x, s: r.rms_norm(x, s, norm, scale)[0],
            x,
            residual,
            dtype=dtype_for(residual, norm.dtype),
        )[0]
        return normed, residual

    def rope_and_store(
        self,
        qkv: Tensor,
        rope: RopeArgs,
        positions: Tensor,
        slot_mapping: Tensor,
        view: KvcacheView,
        layer: int,
    ) -> Tensor:
        rows = qkv.float()
        if any(norm is not None for norm in rope.norms):
            rows = rows.clone()  # norms work in place
        q = self._run(
            lambda r, x: r.rope_and_store(x, rope, positions, slot_mapping, view, layer),
            rows,
            dtype=dtype_for(rows, view.format.dtype),
            storage=view,
            positions=positions,
            slot_mapping=slot_mapping,
        )[0]
        return q.reshape(len(q), rope.num_heads, -1)

    def plan_attention(
        self, batch: ForwardBatch, _block_size: int, window: int = 0
    ) -> tuple[ForwardBatch, int]:
        """Return the batch and the window: the C++ code plans each step itself."""
        return batch, window

    def attention(
        self,
        q: Tensor,
        view: KvcacheView,
        layer: int,
        plan: tuple[ForwardBatch, int],
        scores: AttentionArgs,
    ) -> Tensor:
        batch, window = plan
        return self._run(
            lambda r, x: r.attention(x, view, layer, window, scores),
            q.flatten(1).contiguous(),
            dtype=q.dtype,
            storage=view,
            batch=batch,
        )[0]

    def gate(self, x: Tensor, activation: str = "silu", dtype: Dtype | None = None) -> Tensor:
        """Implement `Ops.gate`. The result is rounded to `dtype`, by default that of x."""
        return self._run(lambda r, x: r.gate(x, activation), x.float(), dtype=dtype or x.dtype)[0]

    def _store_latents(
        self,
        q: Tensor,
        c: Tensor,
        weights: LatentWeights,
        rope: RopeArgs,
        positions: Tensor,
        slot_mapping: Tensor,
        view: KvcacheView,
        layer: int,
    ) -> Tensor:
        queries = self._run(
            lambda r, q, c: r.latent.store(
                q, c, weights, rope, positions, slot_mapping, view, layer
            ),
            q.float().contiguous(),
            c.float().contiguous(),
            dtype=dtype_for(q, view.format.dtype),
            storage=view,
            positions=positions,
            slot_mapping=slot_mapping,
        )[0]
        return queries.reshape(len(queries), rope.num_heads, -1)

    def _latent_values(self, attended: Tensor, weights: LatentWeights) -> Tensor:
        return self._run(
            lambda r, x: r.latent.values(x, weights),
            attended,
            dtype=dtype_for(attended, weights.kv.dtype),
        )[0]

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: Dtype,
        device: Device,
        latent: Latent | None = None,
        form: Format | Stack | None = None,
        segments: tuple[int, ...] | None = None,
        *,
        arena: Arena | None = None,
    ) -> PackedWeight | LatentWeight | QuantisedWeight | CpuStack:
        (rows, columns), threads = shape, self.num_threads
        arena = self.arena if arena is None else arena
        if isinstance(form, Stack):
            return CpuStack(columns, dtype, threads, form, segments, arena)
        if form is not None:
            return QuantisedWeight(rows, columns, dtype, threads, form, segments, arena)
        if latent is not None:
            return LatentWeight(rows, latent, dtype, threads, arena)
        return PackedWeight(rows, columns, dtype, threads, arena)

    def compile(
        self, trunk: Trunk, batch: ForwardBatch, view: KvcacheView, dtype: Dtype
    ) -> Program:
        """Record the calls of `trunk`. Return a function of a batch that replays them."""
        recorder = Recorder(dtype, self.moe, self.states)
        hidden = trunk(recorder, batch, view)
        return Program(recorder, (), (hidden,), view, self.num_threads, self.kernels)

    def _run(
        self, record: Callable[..., Any], *inputs: Tensor | None, **options: Any
    ) -> list[Tensor]:
        return run_once(
            record, *inputs, num_threads=self.num_threads, kernels=self.kernels, **options
        )


def cpu_ops(
    num_threads: int, instruction_set: str | None = None, *, sums: Law | None = None
) -> Ops:
    """Return the backend as `Ops`. Raise `KernelsUnavailable` if its kernels cannot be built.

    Args:
        num_threads: Number of threads that share a step.
        instruction_set: Instruction set of the build. None: the best one with the order `sums`.
        sums: Order in which products of bfloat16 are added up. None: that of the fastest build.
    """
    ops = CpuOps(num_threads, instruction_set or best_instruction_set(sums))
    names = (field.name for field in fields(Ops))
    operations = {name: getattr(ops, name) for name in names if hasattr(ops, name)}
    return Ops(name="cpu", version=VERSION, schedule_invariant=True, in_segments=True, **operations)
