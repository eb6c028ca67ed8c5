"""The architectures that GGUF files are converted from: what each calls its tensors and its
metadata.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from nano_inference.errors import ModelLoadError

Config = dict[str, Any]
Transform = Callable[[np.ndarray, Config], np.ndarray]


def _unpermute_rows(weight: np.ndarray, config: Config, heads_key: str) -> np.ndarray:
    """Query or key rows in Hugging Face's order. `weight` [num_heads * head_dim, hidden_size] in
    GGUF's order.
    """
    # GGUF rotates neighbours (0, 1), (2, 3) ...; Hugging Face rotates (0, head_dim / 2), (1,
    # head_dim / 2 + 1) ...
    num_heads, head_dim = config[heads_key], config["head_dim"]
    if weight.shape[0] != num_heads * head_dim:
        raise ModelLoadError(
            f"a weight has {weight.shape[0]} rows; {heads_key} * head_dim is {num_heads * head_dim}"
        )
    pairs = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _minus_one(weight: np.ndarray, config: Config) -> np.ndarray:
    """A norm's weight where Hugging Face multiplies by 1 + weight and GGUF stores that sum."""
    return weight - np.float32(1)


def _gemma3_defaults(config: Config) -> Config:
    """What every Gemma 3 has and its GGUF file leaves to the reader, as llama.cpp fills it in."""
    num_layers, period = config["num_hidden_layers"], config.get("sliding_window_pattern", 6)
    # The 27B model alone scales queries by something else than head_dim. Only its depth tells it
    # from the others.
    split_evenly = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "layer_types": [
            "sliding_attention" if i % period else "full_attention"
            for i in range(1, num_layers + 1)
        ],
        "query_pre_attn_scalar": split_evenly if num_layers == 62 else config["head_dim"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": False,
    }


@dataclass(frozen=True)
class Family:
    """How one `general.architecture` of GGUF maps to Hugging Face's configuration and tensor
    names.
    """

    architecture: str  # Hugging Face's class name
    model_type: str
    # what follows "blk.N." in GGUF -> what follows "model.layers.N."
    layer_names: Mapping[str, str]
    # GGUF name without "blk.N." -> stored values to Hugging Face's
    transforms: Mapping[str, Transform]
    # required metadata key without its "llama." -> configuration key
    config_keys: Mapping[str, str]
    # the same of keys that a file may lack
    optional_keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Callable[[Config], Config] = lambda config: {}  # what holds where no metadata says it
    # a file may hold `rope_freqs.weight`, which divides the rotary frequencies
    has_rope_freqs: bool = False
    # ids that also end a sample where the file carries a chat template
    chat_eos_ids: tuple[int, ...] = ()


GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
OPTIONAL_NAMES = frozenset({"output.weight"})

_LLAMA_NAMES: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIASES: Mapping[str, str] = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
_QK_NORMS: Mapping[str, str] = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
# Gemma 3 norms what goes into attention and MLP and what comes out of each.
_FOUR_NORMS: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_LLAMA_KEYS: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_ROPE_BASE: Mapping[str, str] = {"rope.freq_base": "rope_theta"}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        layer_names=_LLAMA_NAMES,
        transforms={
            "attn_q.weight": partial(_unpermute_rows, heads_key="num_attention_heads"),
            "attn_k.weight": partial(_unpermute_rows, heads_key="num_key_value_heads"),
        },
        config_keys=_LLAMA_KEYS,
        optional_keys=_ROPE_BASE,
        has_rope_freqs=True,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        layer_names={**_LLAMA_NAMES, **_QKV_BIASES},
        transforms={},
        config_keys=_LLAMA_KEYS,
        optional_keys=_ROPE_BASE,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        layer_names={**_LLAMA_NAMES, **_QK_NORMS},
        transforms={},
        config_keys=_LLAMA_KEYS,
        optional_keys=_ROPE_BASE,
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer_names={**_LLAMA_NAMES, **_FOUR_NORMS, **_QK_NORMS},
        transforms=dict.fromkeys((*_FOUR_NORMS, *_QK_NORMS, "output_norm.weight"), _minus_one),
        # Required, unlike Llama's: llama.cpp's own defaults for the last two are not Gemma's.
        config_keys={**_LLAMA_KEYS, **_ROPE_BASE, "attention.sliding_window": "sliding_window"},
        optional_keys={
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults=_gemma3_defaults,
        chat_eos_ids=(1, 106),  # <eos>, <end_of_turn>
    ),
}
