"""`param_table`: every parameter of a model or of a rank's part.

The table drives allocation, loading from disk, weight updates and sharding: a rank's table assigns
it a part of each checkpoint tensor. Rows also hold other names of weights: that of a tied head, and
those under which transformers holds all experts of a layer in one tensor.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from nano_inference.models.parameters.experts import expert_params
from nano_inference.models.parameters.param import ParamSpec, Source
from nano_inference.models.parameters.rows import (
    norm_param,
    own_part,
    plain_param,
    product_param,
    stacked_param,
)
from nano_inference.models.sharding.shard import ModelShard, shard_of
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.states import DeltaNet, ShortConv
from nano_inference.models.spec.text_part import other_names

HEAD = "lm_head.weight"  # name in a checkpoint, also if the head is tied to the embedding


# Parameters of the xIELU activation. The last two are not trained.
XIELU = ("alpha_p", "alpha_n", "beta", "eps")


# Norms of a layer by placement: (name in the decoder, name in the checkpoint).
_NORMS = {
    "pre": (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")),
    "post": (
        ("attn_out_norm", "post_attention_layernorm"),
        ("mlp_out_norm", "post_feedforward_layernorm"),
    ),
    "both": (
        ("attn_norm", "input_layernorm"),
        ("attn_out_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_out_norm", "post_feedforward_layernorm"),
    ),
}


@lru_cache(16)
def param_table(spec: ModelSpec, part: ModelShard | None = None) -> tuple[ParamSpec, ...]:
    """Return every parameter of a model or of a rank's part.

    Args:
        spec: Description of the whole model.
        part: Part that the rank holds. None: everything.
    """
    part = part if part is not None else shard_of(spec)
    hidden, vocab = spec.hidden_size, spec.vocab_size
    table: list[ParamSpec] = []
    if part.has_embedding:
        source = Source(
            "model.embed_tokens.weight", (vocab, hidden), 0, own_part(part.vocab, vocab)
        )
        tied = HEAD if spec.tie_word_embeddings else None
        embed = plain_param("embed", source)
        table.append(replace(embed, tied=tied, codes="embedding" if tied is None else "head"))
    if spec.layer_inputs:
        table += _layer_inputs(spec)
    for index, i in enumerate(part.layers):
        if spec.state is not None and spec.state.layers[i]:
            table += _with_state(spec, f"layers.{index}", f"model.layers.{i}")
        else:
            attention = _attention if spec.latent is None else _latent_attention
            table += attention(part, i, f"layers.{index}", f"model.layers.{i}.self_attn")
        has_experts = spec.moe is not None and spec.moe.layers[i]
        if spec.moe is not None and has_experts:
            table += expert_params(part, spec.moe, f"layers.{index}", f"model.layers.{i}")
        if spec.moe is None or not has_experts or spec.moe.beside:
            table += _mlp(part, i, f"layers.{index}", f"model.layers.{i}.mlp")
        table += _own_of_layer(spec, f"layers.{index}", f"model.layers.{i}")
        table += [
            norm_param(spec, f"layers.{index}.{ours}", f"model.layers.{i}.{hf}.weight", hidden)
            for ours, hf in _NORMS[spec.norms]
        ]
    if part.position.is_last_stage:
        table.append(norm_param(spec, "norm", "model.norm.weight", hidden))
    if part.has_head:
        head = plain_param("head", Source(HEAD, (vocab, hidden), 0, own_part(part.vocab, vocab)))
        table.append(replace(head, codes="head"))
    if spec.bare_norms:
        table = [param for param in table if not param.name.endswith("norm")]
    params = tuple(_renamed(param, spec.renamed) for param in table)
    return tuple(map(_also_named, params)) if spec.is_text_part else params


def _renamed(param: ParamSpec, names: tuple[tuple[str, str], ...]) -> ParamSpec:
    """Replace the usual parts of checkpoint names with this model's."""
    sources = param.sources
    for ours, theirs in names:
        sources = tuple(replace(each, name=each.name.replace(ours, theirs)) for each in sources)
    return replace(param, sources=sources)


def _also_named(param: ParamSpec) -> ParamSpec:
    """Add the other names that a multimodal checkpoint may use for these tensors."""
    names = [each.name for each in param.sources] + ([] if param.tied is None else [param.tied])
    return replace(
        param, other_names=tuple((name, other) for name in names for other in other_names(name))
    )


def _layer_inputs(spec: ModelSpec) -> list[ParamSpec]:
    """Return the weights that make the inputs of all layers."""
    hidden, width = spec.hidden_size, spec.num_layers * spec.layer_inputs
    known = Source("model.embed_tokens_per_layer.weight", (spec.layer_vocab, width))
    project = Source("model.per_layer_model_projection.weight", (width, hidden))
    norm = "model.per_layer_projection_norm.weight"
    return [
        plain_param("inputs_embed", known),
        product_param("inputs_project", project),
        norm_param(spec, "inputs_norm", norm, spec.layer_inputs),
    ]


def _own_of_layer(spec: ModelSpec, prefix: str, layer: str) -> list[ParamSpec]:
    """Return a layer's weights for its input, and the factor of its output."""
    hidden, width, params = spec.hidden_size, spec.layer_inputs, list[ParamSpec]()
    if width:
        gate = Source(f"{layer}.per_layer_input_gate.weight", (width, hidden))
        out = Source(f"{layer}.per_layer_projection.weight", (hidden, width))
        norm = f"{layer}.post_per_layer_input_norm.weight"
        params += [
            product_param(f"{prefix}.input_gate", gate),
            product_param(f"{prefix}.input_out", out),
            norm_param(spec, f"{prefix}.input_norm", norm, hidden),
        ]
    if spec.layer_scales:
        scale = plain_param(f"{prefix}.scale", Source(f"{layer}.layer_scalar", (1,)))
        params.append(replace(scale, keep_float32=True))
    return params


def _with_state(spec: ModelSpec, prefix: str, layer: str) -> list[ParamSpec]:
    if isinstance(spec.state, DeltaNet):
        return _delta_net(spec, spec.state, prefix, f"{layer}.linear_attn")
    assert spec.state is not None
    return _short_conv(spec, spec.state, prefix, f"{layer}.conv")


def _delta_net(spec: ModelSpec, net: DeltaNet, prefix: str, hf: str) -> list[ParamSpec]:
    """Return a layer's weights. One matrix makes conv inputs, gates, betas and decays."""
    hidden, heads = spec.hidden_size, net.value_heads
    rows: dict[str, tuple[int, tuple[range, ...]]]
    if net.joint:
        group = heads // net.key_heads
        wide = group * net.value_dim
        qkvz, ba = (net.key_dim, net.key_dim, wide, wide), (group, group)
        rows = {
            f"in_proj_{name}": (net.key_heads * sum(sizes), _by_part(sizes, net.key_heads))
            for name, sizes in (("qkvz", qkvz), ("ba", ba))
        }
    else:
        sizes = {"qkv": net.channels, "z": net.value_width, "b": heads, "a": heads}
        rows = {f"in_proj_{name}": (size, (range(size),)) for name, size in sizes.items()}
    floats = {"log_decay": "A_log", "decay_bias": "dt_bias"}
    return [
        replace(
            stacked_param(f"{prefix}.mix_in", hf, "weight", rows, (hidden,)),
            codes="layers",
            stacks=True,
        ),
        plain_param(f"{prefix}.conv", Source(f"{hf}.conv1d.weight", (net.channels, 1, net.taps))),
        *(
            replace(
                plain_param(f"{prefix}.{name}", Source(f"{hf}.{theirs}", (heads,))),
                keep_float32=True,
            )
            for name, theirs in floats.items()
        ),
        plain_param(f"{prefix}.mix_norm", Source(f"{hf}.norm.weight", (net.value_dim,))),
        product_param(
            f"{prefix}.mix_out",
            Source(f"{hf}.out_proj.weight", (hidden, net.value_width), 1, net.output_parts),
        ),
    ]


def _by_part(sizes: tuple[int, ...], heads: int) -> tuple[range, ...]:
    """Reorder rows that are grouped by head, then by part, into groups by part: all heads' first
    part, then all heads' second.
    """
    whole, starts = sum(sizes), (0, *accumulate(sizes))
    return tuple(
        range(head * whole + start, head * whole + start + size)
        for start, size in zip(starts, sizes, strict=False)
        for head in range(heads)
    )


def _short_conv(spec: ModelSpec, conv: ShortConv, prefix: str, hf: str) -> list[ParamSpec]:
    hidden, channels = spec.hidden_size, conv.channels
    shapes = {
        "mix_in": ("in_proj", (3 * channels, hidden)),
        "conv": ("conv", (channels, 1, conv.taps)),
        "mix_out": ("out_proj", (hidden, channels)),
    }
    params: list[ParamSpec] = []
    for name, (theirs, shape) in shapes.items():
        make = plain_param if name == "conv" else product_param
        params.append(make(f"{prefix}.{name}", Source(f"{hf}.{theirs}.weight", shape)))
        if conv.bias:
            bias = Source(f"{hf}.{theirs}.bias", shape[:1])
            params.append(plain_param(f"{prefix}.{name}_bias", bias))
    return params


def _attention(part: ModelShard, layer: int, prefix: str, hf: str) -> list[ParamSpec]:
    spec, kind, kv_heads = part.whole, part.whole.layer(layer), part.kv_heads_of(layer)
    size, makes_keys = kind.head_dim, kind.keys_of == layer
    hidden, q_rows, kv_rows = spec.hidden_size, spec.num_heads * size, kind.kept
    group = spec.num_heads // kind.num_kv_heads
    kv = range(kv_heads.start * size, kv_heads.stop * size)
    # all query heads of the rank's KV heads
    q_heads = range(kv_heads.start * group, kv_heads.stop * group)
    q = range(q_heads.start * size, q_heads.stop * size)
    rows: dict[str, tuple[int, tuple[range, ...]]] = {"q_proj": (q_rows, (q,))}
    if makes_keys:
        rows["k_proj"] = (kv_rows, (kv,))
    if makes_keys and not kind.joint:
        rows["v_proj"] = (kv_rows, (kv,))
    # the checkpoint alternates queries and gates head by head; here all gates come first
    if spec.gated_attention:
        parts = _by_part((size, size), spec.num_heads)
        rows["q_proj"] = (2 * q_rows, (*parts[spec.num_heads :], *parts[: spec.num_heads]))
    if spec.fused_qkv:
        after, value = q_rows, q_rows + kv_rows
        parts = (
            q,
            range(after + kv.start, after + kv.stop),
            range(value + kv.start, value + kv.stop),
        )
        rows = {"qkv_proj": (q_rows + 2 * kv_rows, parts)}
    columns = range(part.heads.start * size, part.heads.stop * size)
    params = [
        replace(
            stacked_param(f"{prefix}.qkv", hf, "weight", rows, (hidden,)),
            codes="layers",
            stacks=True,
        ),
        product_param(
            f"{prefix}.o",
            Source(f"{hf}.o_proj.weight", (hidden, q_rows), 1, own_part(columns, q_rows)),
            part.head_segments_of(layer),
        ),
    ]
    if spec.qkv_bias:
        params.append(stacked_param(f"{prefix}.qkv_bias", hf, "bias", rows, ()))
    if spec.attention_sinks:
        sinks = Source(f"{hf}.sinks", (spec.num_heads,), 0, own_part(q_heads, spec.num_heads))
        params.append(replace(plain_param(f"{prefix}.sinks", sinks), keep_float32=True))
    if spec.o_bias:
        params.append(plain_param(f"{prefix}.o_bias", Source(f"{hf}.o_proj.bias", (hidden,))))
    if spec.qk_norm:
        widths = (size, size) if spec.qk_norm == "head" else (q_rows, kv_rows)
        params += [
            norm_param(spec, f"{prefix}.{which}_norm", f"{hf}.{which}_norm.weight", width)
            for which, width in zip("qk", widths, strict=True)
            if which == "q" or makes_keys
        ]
    return params


def _latent_attention(part: ModelShard, _layer: int, prefix: str, hf: str) -> list[ParamSpec]:
    spec = part.whole
    latent = spec.latent
    assert latent is not None
    sizes, heads, hidden = latent.sizes, spec.num_heads, spec.hidden_size
    matrices = {
        "kv_a": ("kv_a_proj_with_mqa", sizes.rank + sizes.rotary, hidden),
        "kv_b": ("kv_b_proj", heads * (sizes.plain + sizes.value), sizes.rank),
        "o": ("o_proj", hidden, heads * sizes.value),
    }
    norms = {"kv_a_norm": ("kv_a_layernorm", sizes.rank)}
    q_rows = heads * (sizes.plain + sizes.rotary)
    if latent.query_rank is None:
        matrices["q_b"] = ("q_proj", q_rows, hidden)
    else:
        matrices["q_a"] = ("q_a_proj", latent.query_rank, hidden)
        matrices["q_b"] = ("q_b_proj", q_rows, latent.query_rank)
        norms["q_a_norm"] = ("q_a_layernorm", latent.query_rank)
    return [
        *(
            replace(
                plain_param(f"{prefix}.{name}", Source(f"{hf}.{source}.weight", (rows, columns))),
                latent=sizes if name == "kv_b" else None,
                codes=None if name == "kv_b" else "layers",
                segments=part.head_segments if name == "o" else None,
            )
            for name, (source, rows, columns) in matrices.items()
        ),
        *(
            norm_param(spec, f"{prefix}.{name}", f"{hf}.{source}.weight", width)
            for name, (source, width) in norms.items()
        ),
    ]


def _mlp(part: ModelShard, layer: int, prefix: str, hf: str) -> list[ParamSpec]:
    spec, held = part.whole, part.inner_of(layer)
    hidden, inner = spec.hidden_size, spec.layer(layer).intermediate_size
    rows = {"gate_proj": (inner, (held,)), "up_proj": (inner, (held,))}
    if spec.fused_gate_up:
        parts = (held, range(inner + held.start, inner + held.stop))
        rows = {"gate_up_proj": (2 * inner, parts)}
    if not spec.gated:
        rows = {"up_proj": (inner, (held,))}
    numbers: list[ParamSpec] = []
    if spec.activation == "xielu":
        sources = tuple(Source(f"{hf}.act_fn.{name}", (1,)) for name in XIELU)
        numbers.append(ParamSpec(f"{prefix}.act", (4,), sources, keep_float32=True))
    up = stacked_param(
        f"{prefix}.gate_up" if spec.gated else f"{prefix}.up", hf, "weight", rows, (hidden,)
    )
    return [
        replace(up, codes="layers"),
        *numbers,
        product_param(
            f"{prefix}.down",
            Source(f"{hf}.down_proj.weight", (hidden, inner), 1, own_part(held, inner)),
            part.inner_segments_of(layer),
        ),
    ]
