"""Supported GGUF architectures: names of their tensors and metadata keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.states import IN_TILES

Config = dict[str, Any]
Order = Callable[[Config], np.ndarray]
Change = Callable[[np.ndarray], np.ndarray]

# Tensors that scale the rotary frequencies.
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# Growth of queries with their position. transformers lists it among the rotary parameters.
QUERY_SCALE, QUERY_BETA = "attention.temperature_scale", "llama_4_scaling_beta"
# A period, or a list with one entry per layer.
WINDOW_PATTERN = "attention.sliding_window_pattern"


def _neighbours_apart(config: Config, heads_key: str) -> np.ndarray:
    """Return the GGUF index of each query or key row in Hugging Face's order."""
    # GGUF rotates pairs (0, 1), (2, 3), and so on. Hugging Face rotates (0, head_dim / 2),
    # (1, head_dim / 2 + 1), and so on.
    num_heads, head_dim = config[heads_key], config["head_dim"]
    pairs = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _value_heads(config: Config, width: Callable[[Config], int], keys: bool = False) -> np.ndarray:
    """Return the GGUF index of each row of the delta rule's value heads in Hugging Face's order.

    GGUF stores the first value head of every key head, then the second of every key head. `width`
    returns the rows of a head. With `keys`, the unchanged rows of queries and keys come first.
    """
    key_heads, size = config["linear_num_key_heads"], width(config)
    first = 2 * key_heads * config["linear_key_head_dim"] if keys else 0
    rows = np.arange(config["linear_num_value_heads"] * size).reshape(-1, key_heads, size)
    return np.concatenate((np.arange(first), first + rows.swapaxes(0, 1).reshape(-1)))


def _value_dim(config: Config) -> int:
    return config["linear_value_head_dim"]


def _minus_one(numbers: np.ndarray) -> np.ndarray:
    return numbers - np.float32(1)


def _log_of_minus(numbers: np.ndarray) -> np.ndarray:
    """Return the logarithms of negated numbers. Raises `ValueError` unless all are negative."""
    if not (numbers < 0).all():
        raise ValueError("holds numbers of 0 or above")
    return np.log(-numbers)


def _delta_net(values: Mapping[str, Any]) -> Config:
    """Return the sizes and the kinds of layers with and without the delta rule."""
    heads, width = values["ssm.time_step_rank"], values["ssm.inner_size"]
    extra = values.get("nextn_predict_layers", 0)
    count, every = values["block_count"] - extra, values.get("full_attention_interval", 4)
    states = values.get("attention.recurrent_layers")
    if states is None:
        states = [(layer + 1) % every > 0 for layer in range(count)]
    if width % heads or len(states) not in (count, count + extra):
        raise ModelLoadError(
            f"the GGUF metadata has {len(states)} recurrent_layers for {count} layers, and "
            f"{heads} value heads in a width of {width}; layers must match, and the width must be "
            "a multiple."
        )
    kinds = ("linear_attention" if state else "full_attention" for state in states[:count])
    return {
        "num_hidden_layers": count,
        "layer_types": list(kinds),
        "linear_value_head_dim": width // heads,
        **({"mtp_num_hidden_layers": extra} if extra else {}),
    }


def _every_nth_full(config: Config, period: int) -> list[str]:
    """Return layer types with a window in all layers except every n-th."""
    return [
        "sliding_attention" if i % period else "full_attention"
        for i in range(1, config["num_hidden_layers"] + 1)
    ]


def _gemma3_defaults(config: Config) -> Config:
    """Return Gemma 3's constants that GGUF files omit, as in llama.cpp."""
    # Only the 27B model, recognized by its depth, does not scale queries by head_dim.
    split_evenly = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "layer_types": _every_nth_full(config, config.get("sliding_window_pattern", 6)),
        "query_pre_attn_scalar": split_evenly
        if config["num_hidden_layers"] == 62
        else config["head_dim"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": False,
    }


def _gemma2_defaults(config: Config) -> Config:
    """Return Gemma 2's constants that GGUF files omit, as in llama.cpp."""
    # as in Gemma 3, with another depth
    split_evenly = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _every_nth_full(config, 2),
        "sliding_window": 4096,
        "query_pre_attn_scalar": split_evenly
        if config["num_hidden_layers"] == 46
        else config["head_dim"],
        "attention_bias": False,
    }


def _exaone4_defaults(config: Config) -> Config:
    """Return layer types with windows in three of four layers, or without windows."""
    if "sliding_window" in config:
        return {"layer_types": _every_nth_full(config, 4)}
    full = ["full_attention"] * config["num_hidden_layers"]
    return {"sliding_window": None, "layer_types": full}


def _mscales(log: float) -> Config:
    """Return transformers' parameters for yarn's log multiplier, as read by llama.cpp."""
    return {"mscale_all_dim": log, "mscale": 1.0}


def _latent_mscales(log: float) -> Config:
    """Return yarn's parameters for DeepSeek, whose files store a tenth of the multiplier.

    With two equal parameters, yarn scales scores but not cosines.
    """
    mscale = round(10 * log, 6)
    return {"mscale_all_dim": mscale, "mscale": mscale}


def _latent_heads(values: Mapping[str, Any]) -> Config:
    """Return the head sizes of attention over latents.

    In newer files, the usual metadata keys describe the latents that all heads share. Keys that end
    in `_mla` have transformers' sizes.
    """
    sizes = [
        values.get(f"attention.{name}_mla", values.get(f"attention.{name}"))
        for name in ("key_length", "value_length")
    ]
    rotary, heads = values["rope.dimension_count"], values["attention.head_count"]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes[0] <= rotary:
        raise ModelLoadError(
            f"the GGUF metadata has heads of {sizes[0]} and {sizes[1]} numbers, {rotary} of them "
            "rotary; both sizes must be positive, and the first larger than the rotary part"
        )
    return {
        "num_key_value_heads": heads,
        "head_dim": rotary,
        "qk_nope_head_dim": sizes[0] - rotary,
        "v_head_dim": sizes[1],
    }


def _deepseek_defaults(config: Config) -> Config:
    """Return llama.cpp's defaults for keys that a file may omit."""
    return {
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "n_shared_experts": None,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": False,
    }


def _deepseek2_defaults(config: Config) -> Config:
    limited = config.get("n_group", 1) > 1
    method = "group_limited_greedy" if limited else "greedy"
    return {**_deepseek_defaults(config), "topk_method": method}


@dataclass(frozen=True)
class Family:
    """Mapping of a GGUF `general.architecture` to Hugging Face's configuration and tensor names.

    Attributes:
        architecture: Class name in Hugging Face.
        model_type: Name in config.json.
        layer_names: GGUF name after `blk.N.` -> Hugging Face name after `model.layers.N.`. A name
            with `{expert}` is split into the tensors of all experts. If two tensors have the same
            name, their rows are concatenated, expert by expert.
        global_names: Names of the tensors outside of layers.
        config_keys: Required metadata key, without prefix such as `llama.` -> configuration key.
        optional_keys: Optional metadata key -> configuration key.
        optional_names: Keys of `layer_names` that a file may lack.
        switches: Tensor key -> configuration key that is true if layer 0 has the tensor.
        mtp_names: GGUF name after `blk.N.` -> Hugging Face name, for tensors that only a layer of
            multi-token prediction has. The file counts this layer among the others.
        row_orders: Tensor key -> function that returns the stored row for each Hugging Face row.
        column_orders: Tensor key -> function that returns the stored column for each Hugging Face
            column. The order consists of runs of consecutive columns.
        changed: Tensor key -> function from the stored numbers to Hugging Face's.
        rope_factors: Tensors that scale the rotary frequencies, which a file may contain.
        unscaled_in_windows: True if layers with a window use the rope base without scaling.
        keyless_layers: transformers' name of layers without keys. The key head count is then a
            list.
        turned: Keys of tensors [groups, rows, columns] that Hugging Face transposes. If two tensors
            have the same name, the rows of a group are concatenated, and then the groups.
        yarn: transformers' parameters of yarn that no metadata has.
        mscales: Function for the parameters of yarn's log multiplier.
        heads: Function for the head sizes, if these are not all equal.
        combined: Function for values that depend on several metadata keys.
        combined_keys: Metadata keys that only `combined` reads.
        unread: Metadata keys without effect.
        constants: Required values of some metadata keys, if present.
        partial_rotary: transformers' default for the rotary part of a head. None if heads are
            always rotated whole.
        chat_eos_ids: Additional ids that end a sample if the file has a chat template.
        variant: Key and family that replaces this one if the metadata key is present and not 0. If
            the family's `constants` include the key, the value must also match.
        defaults: Function for values that no metadata has.
    """

    architecture: str
    model_type: str
    layer_names: Mapping[str, str]
    config_keys: Mapping[str, str]
    global_names: Mapping[str, str] = field(default_factory=lambda: GLOBAL_NAMES)
    optional_keys: Mapping[str, str] = field(default_factory=dict)
    optional_names: frozenset[str] = frozenset()
    switches: Mapping[str, str] = field(default_factory=dict)
    row_orders: Mapping[str, Order] = field(default_factory=dict)
    column_orders: Mapping[str, Order] = field(default_factory=dict[str, Order])
    changed: Mapping[str, Change] = field(default_factory=dict[str, Change])
    mtp_names: Mapping[str, str] = field(default_factory=dict[str, str])
    rope_factors: frozenset[str] = frozenset()
    unscaled_in_windows: bool = False
    keyless_layers: str | None = None
    turned: frozenset[str] = frozenset()
    yarn: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mscales: Callable[[float], Config] = _mscales
    heads: Callable[[Mapping[str, Any]], Config] | None = None
    combined: Callable[[Mapping[str, Any]], Config] = lambda values: {}
    combined_keys: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    partial_rotary: float | None = None
    chat_eos_ids: tuple[int, ...] = ()
    variant: "tuple[str, Family] | None" = None
    defaults: Callable[[Config], Config] = lambda config: {}

    def of(self, metadata: Mapping[str, Any]) -> "Family":
        """Return the family of a file: this one or its variant."""
        if self.variant is None:
            return self
        key, other = self.variant
        value = metadata.get(f"{metadata['general.architecture']}.{key}")
        return other if value and value == other.constants.get(key, value) else self


GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
OPTIONAL_NAMES = frozenset({"output.weight"})

_ATTENTION: Mapping[str, str] = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
_MLP: Mapping[str, str] = {
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TWO_NORMS: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_NORMS_AFTER: Mapping[str, str] = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
# Gemma normalizes inputs and outputs of both attention and MLP.
_FOUR_NORMS: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    **_NORMS_AFTER,
}
_QKV_BIASES: Mapping[str, str] = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
_BIASES: Mapping[str, str] = {**_QKV_BIASES, "attn_output.bias": "self_attn.o_proj.bias"}
_QK_NORMS: Mapping[str, str] = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_LLAMA_NAMES: Mapping[str, str] = {**_TWO_NORMS, **_ATTENTION, **_MLP}


def _experts(module: str, gate: str, up: str, down: str) -> Mapping[str, str]:
    """Return the names of a router and of one tensor per expert matrix that holds all experts."""
    return {
        "ffn_gate_inp.weight": f"{module}.gate.weight",
        "ffn_gate_exps.weight": f"{module}.experts.{{expert}}.{gate}.weight",
        "ffn_up_exps.weight": f"{module}.experts.{{expert}}.{up}.weight",
        "ffn_down_exps.weight": f"{module}.experts.{{expert}}.{down}.weight",
    }


_QWEN_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")

_LLAMA_KEYS: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_ROPE_BASE: Mapping[str, str] = {"rope.freq_base": "rope_theta"}
_EXPERT_KEYS: Mapping[str, str] = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
_WINDOW = "attention.sliding_window"

# Tensors that llama.cpp rotates in adjacent pairs.
_PAIRED_ROWS: Mapping[str, Order] = {
    f"attn_{part}.{kind}": partial(_neighbours_apart, heads_key=heads)
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for kind in ("weight", "bias")
}

_LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    layer_names={**_LLAMA_NAMES, **_BIASES},
    optional_names=frozenset(_BIASES),
    switches={"attn_q.bias": "attention_bias"},
    row_orders=_PAIRED_ROWS,
    config_keys=_LLAMA_KEYS,
    optional_keys=_ROPE_BASE,
    rope_factors=frozenset({ROPE_FREQS}),
)
_MIXTRAL = replace(
    _LLAMA,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    layer_names={**_TWO_NORMS, **_ATTENTION, **_experts("block_sparse_moe", "w1", "w3", "w2")},
    optional_names=frozenset(),
    switches={},
    config_keys={
        **_LLAMA_KEYS,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
)
_QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    layer_names={**_LLAMA_NAMES, **_QKV_BIASES},
    config_keys=_LLAMA_KEYS,
    optional_keys=_ROPE_BASE,
)
_QWEN3 = replace(
    _QWEN2,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    layer_names={**_LLAMA_NAMES, **_QK_NORMS},
)

_MISTRAL = replace(
    _LLAMA,
    architecture="MistralForCausalLM",
    model_type="mistral",
    layer_names=_LLAMA_NAMES,
    optional_names=frozenset(),
    switches={},
    defaults=lambda config: {"sliding_window": None},
)
_MINISTRAL3 = replace(
    _MISTRAL,
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    optional_keys={**_ROPE_BASE, QUERY_SCALE: QUERY_BETA},
)
_GRANITE = replace(
    _LLAMA,
    architecture="GraniteForCausalLM",
    model_type="granite",
    optional_keys={
        **_ROPE_BASE,
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
)
_GRANITE_MOE = replace(
    _GRANITE,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    layer_names={
        **_TWO_NORMS,
        **_ATTENTION,
        "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
        "ffn_gate_exps.weight": "block_sparse_moe.input_linear.weight",
        "ffn_up_exps.weight": "block_sparse_moe.input_linear.weight",
        "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
    },
    optional_names=frozenset(),
    switches={},
    config_keys={
        **_LLAMA_KEYS,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
)
_SHARED_SIZE = "expert_shared_feed_forward_length"
_GRANITE_MOE_SHARED = replace(
    _GRANITE_MOE,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    layer_names={
        **_GRANITE_MOE.layer_names,
        "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight",
        "ffn_up_shexp.weight": "shared_mlp.input_linear.weight",
        "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
    },
    config_keys={**_GRANITE_MOE.config_keys, _SHARED_SIZE: "shared_intermediate_size"},
)
_LFM2_ATTENTION: Mapping[str, str] = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
}
_LFM2_CONVOLUTION: Mapping[str, str] = {
    f"shortconv.{part}.weight": f"conv.{part}.weight" for part in ("conv", "in_proj", "out_proj")
}
_DEEPSEEK_MLP: Mapping[str, str] = {
    **_MLP,
    **_QWEN_EXPERTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{
        f"ffn_{part}_shexp.weight": f"mlp.shared_experts.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}
_DEEPSEEK_SOME: Mapping[str, str] = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    # one tensor, or the key part followed by the value part
    "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
    "attn_k_b.weight": "self_attn.kv_b_proj.weight",
    "attn_v_b.weight": "self_attn.kv_b_proj.weight",
}
_DEEPSEEK2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    layer_names={
        **_TWO_NORMS,
        **_DEEPSEEK_SOME,
        "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        **_DEEPSEEK_MLP,
    },
    optional_names=frozenset((*_DEEPSEEK_SOME, *_DEEPSEEK_MLP)),
    turned=frozenset({"attn_k_b.weight"}),
    config_keys={
        **_LLAMA_KEYS,
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    optional_keys={
        **_ROPE_BASE,
        "attention.q_lora_rank": "q_lora_rank",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    mscales=_latent_mscales,
    heads=_latent_heads,
    constants={"expert_gating_func": 1},  # a softmax
    defaults=_deepseek2_defaults,
)
_DEEPSEEK3 = replace(
    _DEEPSEEK2,
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    constants={"expert_gating_func": 2},  # sigmoids
    defaults=_deepseek_defaults,
)
_DELTA_NORMS: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
_DELTA_RULE: Mapping[str, str] = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_QWEN_MTP: Mapping[str, str] = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
_QWEN35 = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    layer_names={**_DELTA_NORMS, **_ATTENTION, **_QK_NORMS, **_DELTA_RULE, **_MLP},
    optional_names=frozenset((*_ATTENTION, *_QK_NORMS, *_DELTA_RULE)),
    mtp_names=_QWEN_MTP,
    row_orders={
        **dict.fromkeys(
            ("attn_qkv.weight", "ssm_conv1d.weight"),
            partial(_value_heads, width=_value_dim, keys=True),
        ),
        "attn_gate.weight": partial(_value_heads, width=_value_dim),
        **dict.fromkeys(
            ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"),
            partial(_value_heads, width=lambda config: 1),
        ),
    },
    column_orders={"ssm_out.weight": partial(_value_heads, width=_value_dim)},
    changed={
        **dict.fromkeys((*_DELTA_NORMS, *_QK_NORMS, "output_norm.weight"), _minus_one),
        **dict.fromkeys((name for name in _QWEN_MTP if "norm" in name), _minus_one),
        "ssm_a": _log_of_minus,
    },
    config_keys={
        **_LLAMA_KEYS,
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    optional_keys=_ROPE_BASE,
    combined=_delta_net,
    combined_keys=frozenset(
        {"ssm.inner_size", "full_attention_interval", "attention.recurrent_layers"}
    ),
    # a text's positions are the same in all sections
    unread=frozenset({"rope.dimension_sections"}),
    constants={"nextn_predict_layers": 1},
    partial_rotary=0.25,
    defaults=lambda config: {IN_TILES: True},
)
_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    layer_names={**_ATTENTION, **_MLP, **_NORMS_AFTER, **_QK_NORMS},
    config_keys=_LLAMA_KEYS,
    optional_keys=_ROPE_BASE,
)
_OLMO3 = replace(
    _OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    config_keys={**_LLAMA_KEYS, _WINDOW: "sliding_window"},
    unscaled_in_windows=True,
    defaults=lambda config: {"layer_types": _every_nth_full(config, 4)},
)

FAMILIES: Mapping[str, Family] = {
    "llama": replace(_LLAMA, variant=("expert_count", _MIXTRAL)),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3moe": replace(
        _QWEN3,
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layer_names={**_TWO_NORMS, **_ATTENTION, **_QK_NORMS, **_QWEN_EXPERTS},
        config_keys={
            **_LLAMA_KEYS,
            **_EXPERT_KEYS,
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        # as in llama.cpp: experts in all layers, with weights that add up to 1
        defaults=lambda config: {"norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "qwen2moe": replace(
        _QWEN2,
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        layer_names={
            **_TWO_NORMS,
            **_ATTENTION,
            **_QKV_BIASES,
            **_QWEN_EXPERTS,
            "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
            "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
            "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
            "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
        },
        config_keys={
            **_LLAMA_KEYS,
            **_EXPERT_KEYS,
            "expert_feed_forward_length": "moe_intermediate_size",
            _SHARED_SIZE: "shared_expert_intermediate_size",
        },
        # as in llama.cpp: experts in all layers, with weights from the softmax over all experts
        defaults=lambda config: {"norm_topk_prob": False, "decoder_sparse_step": 1},
    ),
    "qwen35": _QWEN35,
    "gemma": Family(
        architecture="GemmaForCausalLM",
        model_type="gemma",
        layer_names={**_TWO_NORMS, **_ATTENTION, **_MLP},
        changed=dict.fromkeys((*_TWO_NORMS, "output_norm.weight"), _minus_one),
        config_keys=_LLAMA_KEYS,
        optional_keys=_ROPE_BASE,
        defaults=lambda config: {"hidden_act": "gelu_pytorch_tanh"},
        chat_eos_ids=(1, 107),  # <eos>, <end_of_turn>
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        layer_names={**_ATTENTION, **_MLP, **_FOUR_NORMS},
        changed=dict.fromkeys((*_FOUR_NORMS, "output_norm.weight"), _minus_one),
        config_keys=_LLAMA_KEYS,
        optional_keys={
            **_ROPE_BASE,
            _WINDOW: "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults=_gemma2_defaults,
        chat_eos_ids=(1, 107),  # <eos>, <end_of_turn>
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer_names={**_ATTENTION, **_MLP, **_FOUR_NORMS, **_QK_NORMS},
        changed=dict.fromkeys((*_FOUR_NORMS, *_QK_NORMS, "output_norm.weight"), _minus_one),
        # Required, unlike in Llama: llama.cpp's defaults for the last two do not fit Gemma.
        config_keys={**_LLAMA_KEYS, **_ROPE_BASE, _WINDOW: "sliding_window"},
        optional_keys={
            WINDOW_PATTERN: "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults=_gemma3_defaults,
        chat_eos_ids=(1, 106),  # <eos>, <end_of_turn>
    ),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE_MOE, variant=(_SHARED_SIZE, _GRANITE_MOE_SHARED)),
    "glm4": Family(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        layer_names={
            "attn_norm.weight": "input_layernorm.weight",
            "post_attention_norm.weight": "post_self_attn_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "post_ffw_norm.weight": "post_mlp_layernorm.weight",
            **_ATTENTION,
            **_QKV_BIASES,
            "ffn_up.weight": "mlp.gate_up_proj.weight",
            "ffn_down.weight": "mlp.down_proj.weight",
        },
        optional_names=frozenset(_QKV_BIASES),
        switches={"attn_q.bias": "attention_bias"},
        config_keys=_LLAMA_KEYS,
        optional_keys=_ROPE_BASE,
        partial_rotary=0.5,
    ),
    "ernie4_5": Family(
        architecture="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        layer_names=_LLAMA_NAMES,
        config_keys=_LLAMA_KEYS,
        optional_keys=_ROPE_BASE,
        defaults=lambda config: {"use_bias": False},
    ),
    "mistral3": replace(_MISTRAL, variant=(QUERY_SCALE, _MINISTRAL3)),
    "gpt-oss": Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        layer_names={
            "attn_norm.weight": "input_layernorm.weight",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            **_ATTENTION,
            **_BIASES,
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp.weight": "mlp.router.weight",
            "ffn_gate_inp.bias": "mlp.router.bias",
            # one tensor per expert, unlike the checkpoints of transformers
            **{
                f"ffn_{part}_exps.{kind}": f"mlp.experts.{{expert}}.{part}_proj.{kind}"
                for part in ("gate", "up", "down")
                for kind in ("weight", "bias")
            },
        },
        switches={"attn_q.bias": "attention_bias"},
        config_keys={
            **_LLAMA_KEYS,
            _WINDOW: "sliding_window",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        optional_keys={**_ROPE_BASE, "expert_feed_forward_length": "intermediate_size"},
        yarn={"truncate": False},
        defaults=lambda config: {"layer_types": _every_nth_full(config, 2)},
        chat_eos_ids=(199999, 200002, 200012),  # <|endoftext|>, <|return|>, <|call|>
    ),
    "lfm2": Family(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        layer_names={
            "attn_norm.weight": "operator_norm.weight",
            "ffn_norm.weight": "ffn_norm.weight",
            "ffn_gate.weight": "feed_forward.w1.weight",
            "ffn_up.weight": "feed_forward.w3.weight",
            "ffn_down.weight": "feed_forward.w2.weight",
            **_LFM2_ATTENTION,
            **_LFM2_CONVOLUTION,
        },
        global_names={
            "token_embd.weight": "model.embed_tokens.weight",
            "token_embd_norm.weight": "model.embedding_norm.weight",
            "output.weight": "lm_head.weight",
        },
        optional_names=frozenset((*_LFM2_ATTENTION, *_LFM2_CONVOLUTION)),
        keyless_layers="conv",
        config_keys={
            **_LLAMA_KEYS,
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
        },
        optional_keys=_ROPE_BASE,
        # the file contains the adjusted width
        defaults=lambda config: {"block_auto_adjust_ff_dim": False, "conv_bias": False},
    ),
    "deepseek2": replace(_DEEPSEEK2, variant=("expert_gating_func", _DEEPSEEK3)),
    "olmo2": replace(_OLMO2, variant=(_WINDOW, _OLMO3)),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        layer_names={**_TWO_NORMS, **_ATTENTION, **_QK_NORMS, **_QWEN_EXPERTS},
        config_keys={**_LLAMA_KEYS, **_EXPERT_KEYS},
        optional_keys=_ROPE_BASE,
        defaults=lambda config: {"norm_topk_prob": False},  # as in llama.cpp
    ),
    "exaone4": Family(
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        layer_names={**_ATTENTION, **_MLP, **_NORMS_AFTER, **_QK_NORMS},
        config_keys=_LLAMA_KEYS,
        optional_keys={**_ROPE_BASE, _WINDOW: "sliding_window"},
        rope_factors=frozenset({ROPE_FREQS}),
        defaults=_exaone4_defaults,
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        layer_names={
            "attn_norm.weight": "input_layernorm.weight",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            **_ATTENTION,
            **_MLP,
            **_BIASES,
        },
        optional_names=frozenset(_BIASES),
        switches={"attn_q.bias": "attention_bias", "attn_output.bias": "attention_out_bias"},
        config_keys=_LLAMA_KEYS,
        optional_keys=_ROPE_BASE,
    ),
    "smollm3": replace(
        _LLAMA,
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        # as in llama.cpp: every fourth layer is without rotation, and no layer has a window
        defaults=lambda config: {"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        layer_names={
            **_TWO_NORMS,
            "attn_qkv.weight": "self_attn.qkv_proj.weight",
            "attn_output.weight": "self_attn.o_proj.weight",
            "ffn_up.weight": "mlp.gate_up_proj.weight",
            "ffn_down.weight": "mlp.down_proj.weight",
        },
        config_keys=_LLAMA_KEYS,
        optional_keys={**_ROPE_BASE, _WINDOW: "sliding_window"},
        rope_factors=frozenset({ROPE_LONG, ROPE_SHORT}),
        partial_rotary=1.0,
    ),
}
