"""Tiny random models in Hugging Face folders, written without transformers to keep tests fast."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.read import spec_from_config


class WithoutNumbers(Tensor):
    """A tensor without local numbers, as a DTensor is."""

    @staticmethod
    def __new__(cls, *shape: int) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape)  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("this tensor has no numbers to compute with")


Rope = Literal["default", "linear", "llama3", "yarn"]
Weights = dict[str, Tensor]

_ROPE_SCALING: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def llama_config(
    *,
    rope: Rope = "default",
    tie: bool = False,
    vocab_size: int = 300,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    layers: int = 2,
    hidden: int = 64,
    inner: int = 96,
    max_position: int = 512,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return the config.json of a tiny Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": hidden // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.2,
        "intermediate_size": inner,
        "max_position_embeddings": max_position,
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_scaling": _ROPE_SCALING[rope],
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocab_size,
    }


def llama_weights(config: dict[str, Any], seed: int = 0, std: float = 0.2) -> Weights:
    """Return random tensors under Hugging Face names. Norm weights vary around 1."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q_rows, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_rows, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_rows, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q_rows),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    weights: Weights = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator) * std
        weights[name] = (drawn + 1.0 if len(shape) == 1 else drawn).to(dtype)
    return weights


def write_model(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    """Write a model folder with one config and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_llama(
    folder: Path,
    *,
    rope: Rope = "default",
    tie: bool = False,
    seed: int = 0,
    vocab_size: int = 300,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    layers: int = 2,
    hidden: int = 64,
    inner: int = 96,
    max_position: int = 512,
    std: float = 0.2,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a tiny random Llama (config.json and model.safetensors) into `folder` and return the
    folder.

    Its logits are peaked but far from one-hot; the end-of-sequence id is 2.
    """
    config = llama_config(
        rope=rope,
        tie=tie,
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        layers=layers,
        hidden=hidden,
        inner=inner,
        max_position=max_position,
        dtype=dtype,
    )
    return write_model(folder, config, llama_weights(config, seed, std))


# Settings of each family that extend or override a tiny Llama's. Windows are shorter than the
# prompts of the tests, and some layers have no window if the family allows that.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-bias": {"attention_bias": True},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 24,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3,
        "sliding_window": 19,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
    },
    "nanochat": {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "hidden_act": "relu2",
        "final_logit_softcapping": 2.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "sliding_window": 17,
        "query_pre_attn_scalar": 40,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": 33,
        "pad_token_id": 0,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.7,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "pad_token_id": 0,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
    },
}

# Families that need no run in the tests over all families. They are covered by
# tests/parity/test_experts.py, and in tests/invariance by test_state_invariance.py and
# test_latent_invariance.py.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_L_cache": 3,
        "conv_bias": True,
        "norm_eps": 1e-5,
        "rms_norm_eps": None,
        "block_multiple_of": 32,
        "full_attn_idxs": None,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "sliding_window": 17,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 300,
        "rope_theta": None,
        "tie_word_embeddings": True,
    },
    "gemma4-moe": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 17,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
        "rope_theta": None,
        "tie_word_embeddings": True,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
}


def tiny_model(
    folder: Path, family: str, *, seed: int = 0, std: float = 0.2, **changes: Any
) -> Path:
    """Write a tiny random model of a family into `folder` and return the folder."""
    config = llama_config() | (FAMILIES | MORE_FAMILIES)[family] | changes
    config = {name: value for name, value in config.items() if value is not None}
    return write_model(folder, config, family_weights(config, seed, std))


def family_weights(config: dict[str, Any], seed: int = 0, std: float = 0.2) -> Weights:
    """Return random tensors under the names and shapes that the decoder expects for this config."""
    spec = spec_from_config(config)
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, slot in slots(param_table(spec)).items():
        drawn = torch.randn(slot.shape, generator=generator) * std
        is_norm = len(slot.shape) == 1 and name.endswith(("weight", "scale", "scalar"))
        weights[name] = (drawn + 1.0 - spec.norm_offset if is_norm else drawn).to(
            getattr(torch, config["torch_dtype"])
        )
    return weights
