"""Attention over keys and values."""

from nano_inference.arrays import namespace
from nano_inference.models.blocks.linear import Linear, row_parallel
from nano_inference.models.blocks.step import Block, ModelPart, Step
from nano_inference.ops.interface import AttentionArgs, HeadNorms, RopeArgs, X
from nano_inference.ops.rowwise import Norm


class Attention:
    """Multi-head attention: one product makes queries, keys and values, one the output."""

    def __init__(self, part: ModelPart, layer: int) -> None:
        self.qkv = Linear(part, f"layers.{layer}.qkv")
        self.attend = Attend(part, layer)
        self.o = output(part, layer)

    def __call__(self, step: Step[X], x: X) -> X:
        return self.o(step, self.attend(step, self.qkv(step, x)))

    def store(self, step: Step[X], x: X) -> X:
        """Store the keys and values of rows. Return their queries."""
        return self.attend.store(step, self.qkv(step, x))


class Attend:
    """Attention between the products: rotate queries and keys, store keys and values, attend."""

    def __init__(self, part: ModelPart, layer: int) -> None:
        spec = part.spec
        kind = spec.layer(layer)
        rope, self.layer = part.ropes[layer], layer
        self.rope = RopeArgs(
            rope.cos,
            rope.sin,
            spec.num_heads,
            kind.num_kv_heads if kind.keys_of == layer else 0,
            head_norms(part, layer),
            rope.interleaved,
            rope.query_scales,
            kind.joint,
        )
        self.scores = AttentionArgs(
            spec.attention_scale,
            part.params.get(f"layers.{layer}.sinks"),
            spec.attention_cap,
            0 if spec.latent is None else spec.latent.sizes.rotary,
        )
        self.window, self.width = spec.windows[layer], spec.num_heads * kind.head_dim
        self.context, self.dtype = part.context, part.dtype

    def __call__(self, step: Step[X], qkv: X) -> X:
        """Compute [queries, keys, values] -> attention's output [N, heads * D]."""
        return self.read(step, self.store(step, qkv))

    def read(self, step: Step[X], q: X) -> X:
        """Compute the queries of stored rows -> attention's output [N, heads * D]."""
        ops, batch, view, layer = step.ops, step.batch, step.view, self.layer
        if self.context is None:
            return ops.attention(q, view, layer, step.plans[self.window], self.scores)
        attend = self.context.attention(view, layer, self.window, self.scores)
        return ops.call(batch, attend, (q,), self.width, self.dtype)

    def store(self, step: Step[X], qkv: X) -> X:
        """Rotate queries and keys, and store keys and values. Return the queries [N, heads, D]."""
        where = step.batch.positions, step.batch.slot_mapping, step.view, self.layer
        return step.ops.rope_and_store(qkv, self.rope, *where)


class OwnHeads:
    """The output product of attention, for the heads whose sums this rank computes."""

    def __init__(self, product: Block, start: int, stop: int) -> None:
        self.product, self.start, self.stop = product, start, stop

    def __call__(self, step: Step[X], x: X) -> X:
        return self.product(step, step.ops.columns(x, self.start, self.stop))


def output(part: ModelPart, layer: int) -> Block:
    """Return the output product of a layer's attention."""
    shard = part.exchange.part
    segments = shard.head_segments_of(layer)
    product = row_parallel(part, f"layers.{layer}.o", shard.head_columns, segments)
    start, stop = shard.own_columns
    if stop - start < part.spec.num_heads * part.spec.value_dim:
        return OwnHeads(product, start, stop)
    return product


def head_norms(part: ModelPart, layer: int) -> HeadNorms:
    """Return the norms of a layer's queries, keys and values."""
    spec, kind, name = part.spec, part.spec.layer(layer), f"layers.{layer}."
    makes_keys = kind.keys_of == layer
    queries = keys = values = None
    if spec.qk_norm:
        queries = part.norm(name + "q_norm", kind.head_dim)
        keys = part.norm(name + "k_norm", kind.head_dim) if makes_keys else None
    if spec.value_norm and makes_keys:
        cos = part.ropes[layer].cos
        ones = namespace(cos).ones(kind.head_dim, dtype=cos.dtype, device=cos.device)
        values = Norm(ones, spec.rms_norm_eps, 0.0, part.dtype)
    return HeadNorms(queries, keys, values)
