"""Attention over keys and values."""

from typing import Any

from torch import Tensor

from nano_inference.models.blocks.linear import Linear, row_parallel
from nano_inference.models.blocks.step import Block, ModelPart, Step
from nano_inference.ops.interface import Norm


class Attention:
    """Multi-head attention: one product makes queries, keys and values, another one ends it."""

    def __init__(self, part: ModelPart, layer: int) -> None:
        self.qkv = Linear(part, f"layers.{layer}.qkv")
        self.attend = Attend(part, layer)
        self.o = output(part, layer)

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        return self.o(step, self.attend(step, self.qkv(step, x)))


class Attend:
    """What lies between the products: turn queries and keys by their positions, store keys and
    values, attend.
    """

    def __init__(self, part: ModelPart, layer: int) -> None:
        spec = part.spec
        kind = spec.layer(layer)
        self.layer, self.rope = layer, part.ropes[layer]
        self.num_heads = spec.num_heads
        self.num_kv_heads = kind.num_kv_heads if kind.keys_of == layer else 0
        self.norms = head_norms(part, layer)
        self.joint = (kind.joint,) if kind.joint else ()  # which not every backend has
        self.scores: tuple[Any, ...] = (spec.attention_scale,)
        if spec.attention_sinks or spec.attention_cap:  # which not every backend has
            self.scores += part.params.get(f"layers.{layer}.sinks"), spec.attention_cap
        self.window, self.width = spec.windows[layer], spec.num_heads * kind.head_dim
        self.context, self.dtype = part.context, part.dtype

    def __call__(self, step: Step, qkv: Tensor) -> Tensor:
        """Compute queries, keys and values side by side -> attention's output [N, heads * D]."""
        ops, batch, view, rope = step.ops, step.batch, step.view, self.rope
        q = ops.rope_and_store(
            qkv,
            rope.cos,
            rope.sin,
            batch.positions,
            view,
            self.layer,
            batch.slot_mapping,
            self.num_heads,
            self.num_kv_heads,
            self.norms,
            rope.interleaved,
            rope.query_scales,
            *self.joint,
        )
        if self.context is None:
            return ops.attention(q, view, self.layer, step.plans[self.window], *self.scores)
        attend = self.context.attention(view, self.layer, self.window, *self.scores)
        return ops.call(batch, attend, (q,), self.width, self.dtype)


class OwnHeads:
    """The product that ends attention, of those heads whose sums are this rank's."""

    def __init__(self, product: Block, start: int, stop: int) -> None:
        self.product, self.start, self.stop = product, start, stop

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        return self.product(step, step.ops.columns(x, self.start, self.stop))


def output(part: ModelPart, layer: int) -> Block:
    """Return the product that ends a layer's attention."""
    own = part.exchange.part
    product = row_parallel(part, f"layers.{layer}.o", own.head_segments_of(layer))
    start, stop = own.own_columns
    if stop - start < part.spec.num_heads * part.spec.value_dim:
        return OwnHeads(product, start, stop)
    return product


def head_norms(part: ModelPart, layer: int) -> tuple[Norm | None, ...] | None:
    """Return the norms of queries, keys and values, as `Ops.rope_and_store` has them."""
    spec, kind, name = part.spec, part.spec.layer(layer), f"layers.{layer}."
    makes_keys = kind.keys_of == layer
    q_norm = k_norm = None
    if spec.qk_norm:
        q_norm = part.norm(name + "q_norm", kind.head_dim)
        k_norm = part.norm(name + "k_norm", kind.head_dim) if makes_keys else None
    if spec.value_norm and makes_keys:
        ones = part.ropes[layer].cos.new_ones(kind.head_dim)
        return q_norm, k_norm, Norm(ones, spec.rms_norm_eps, 0, part.dtype)
    if not spec.qk_norm:
        return None
    return (q_norm, k_norm) if makes_keys else (q_norm,)
