"""A port of llama.cpp's `convert_hf_to_gguf.py` for tiny models: tensor names come from the gguf
package's table, metadata and converted tensors follow its converter classes.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.models.tiny_gguf import gguf, permute_rows, write_gguf

Arrays = dict[str, np.ndarray]
Config = Mapping[str, Any]

# Converters derived from `LlamaModel` reorder query and key rows. Gemma's store norms as 1 + w.
PERMUTED = frozenset({"llama", "granite", "granitemoe", "mistral3", "smollm3"})
PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3", "qwen35"})
MTP = {
    "mtp.fc.weight": "eh_proj",
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
    "mtp.norm.weight": "shared_head_norm",
}
TOKEN_IDS = {f"tokenizer.ggml.{key}_token_id": i for i, key in enumerate(("padding", "bos", "eos"))}


def hf_to_gguf(
    folder: Path,
    path: Path,
    architecture: str,
    matrices: Any = None,
    experts: Any = None,
    others: Mapping[str, Any] = MappingProxyType({}),
    extra: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write the model of a Hugging Face folder as a GGUF file.

    Args:
        folder: Folder with config.json and safetensors files.
        path: Path of the new file.
        architecture: GGUF's name of the architecture.
        matrices: Quantisation of all tensors but vectors and convolutions. None: no quantisation.
        experts: Quantisation of stacked expert tensors only. None: no quantisation.
        others: Quantisation of the matrices whose names hold a word, by that word.
        extra: Metadata outside the architecture's namespace.
        changes: Values by metadata key, without the architecture prefix. None removes the key.
    """
    config = json.loads((folder / "config.json").read_text())
    keys = {**metadata_of(architecture, config), **changes}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    tensors = tensors_of(architecture, config, load_file(folder / "model.safetensors"))
    types = {
        name: matrices
        for name, tensor in tensors.items()
        if matrices is not None and tensor.ndim > 1 and "conv1d" not in name
    }
    if experts is not None:
        types |= {name: experts for name, tensor in tensors.items() if tensor.ndim > 2}
    for word, kind in others.items():
        types |= {name: kind for name in tensors if word in name and tensors[name].ndim > 1}
    return write_gguf(
        path, tensors, {**metadata, **TOKEN_IDS, **(extra or {})}, architecture, types
    )


def tensors_of(architecture: str, config: Config, weights: Arrays) -> Arrays:
    """Return a checkpoint's tensors under GGUF's names, with GGUF's values."""
    (code,) = (code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(code, config["num_hidden_layers"] + 1)
    arrays: Arrays = {}
    if architecture == "deepseek2":
        weights = latents_apart(config, weights)
    if architecture == "qwen35":
        weights = in_tiles(config, weights)
    for name, values in stacked_experts(_apart(architecture, weights)).items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if ".nextn." in name:  # not in the table of gguf 0.19
            gguf_name = name
        assert gguf_name is not None, name
        if architecture in PERMUTED and "q_proj" in name:
            values = permute_rows(values, config["num_attention_heads"])
        if architecture in PERMUTED and "k_proj" in name:
            values = permute_rows(values, config["num_key_value_heads"])
        if architecture in PLUS_ONE and name.endswith("norm.weight") and "_attn.norm" not in name:
            values = values + 1
        # llama.cpp before 2025 wrote a vector here
        values = values[0] if "shared_expert_gate" in name else values
        arrays[gguf_name] = (
            values[:, 0] if name.endswith(("conv.conv.weight", "conv1d.weight")) else values
        )
    rope = _rope(config)
    if rope.get("rope_type") == "llama3":
        arrays["rope_freqs.weight"] = llama3_factors(rope, config["head_dim"])
    return arrays


def in_tiles(config: Config, weights: Arrays) -> Arrays:
    """Reorder value heads as `_LinearAttentionVReorderBase` does: the first of every key head, then
    the second, and so on. `_QwenMtpMixin` appends the layer of multi-token prediction.
    """
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * key_heads * config["linear_key_head_dim"]

    def moved(values: np.ndarray) -> np.ndarray:
        """Reorder the heads along axis 0."""
        by_head = values.reshape(key_heads, heads // key_heads, len(values) // heads, -1)
        return by_head.swapaxes(0, 1).reshape(values.shape)

    arrays: Arrays = {}
    last = config["num_hidden_layers"]
    for name, values in weights.items():
        name = name.replace("mtp.layers.0.", f"model.layers.{last}.")
        if name in MTP:
            name = f"blk.{last}.nextn.{MTP[name]}.weight"
        if re.search(r"in_proj_qkv\.|conv1d\.", name):
            values = np.concatenate((values[:keys], moved(values[keys:])))
        elif re.search(r"in_proj_[zab]\.|\.A_log|\.dt_bias", name):
            values = moved(values)
        elif "linear_attn.out_proj" in name:
            values = np.ascontiguousarray(moved(values.T).T)
        if name.endswith("A_log"):
            values = -np.exp(values)
        arrays[name.replace("dt_bias", "dt_proj.bias")] = values
    return arrays


def _apart(architecture: str, weights: Arrays) -> Arrays:
    """Split gate and up, as `GraniteMoeModel` does."""
    if architecture == "gpt-oss":
        return _gpt_oss_apart(weights)
    if architecture != "granitemoe":
        return weights
    arrays: Arrays = {}
    for name, values in weights.items():
        if not name.endswith("input_linear.weight"):
            arrays[name] = values
            continue
        gate, up = np.split(values, 2, axis=-2)
        layer = name.split(".")[2]
        if "shared" in name:
            prefix = f"model.layers.{layer}.mlp.shared_expert"
            arrays |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        else:
            prefix = f"model.layers.{layer}.mlp.experts"
            arrays |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
    return arrays


def _gpt_oss_apart(weights: Arrays) -> Arrays:
    """Convert tensors that are not in MXFP4 as `GptOssModel` does: transpose them."""
    arrays: Arrays = {}
    for name, values in weights.items():
        start = name.rsplit("experts", 1)[0] + "experts."
        if name.endswith("gate_up_proj"):
            rows = values.swapaxes(1, 2)
            arrays[f"{start}gate_proj.weight"] = np.ascontiguousarray(rows[:, ::2])
            arrays[f"{start}up_proj.weight"] = np.ascontiguousarray(rows[:, 1::2])
        elif name.endswith("gate_up_proj_bias"):
            arrays[f"{start}gate_proj.bias"] = np.ascontiguousarray(values[:, ::2])
            arrays[f"{start}up_proj.bias"] = np.ascontiguousarray(values[:, 1::2])
        elif name.endswith("down_proj"):
            arrays[f"{start}down_proj.weight"] = np.ascontiguousarray(values.swapaxes(1, 2))
        elif name.endswith("down_proj_bias"):
            arrays[f"{start}down_proj.bias"] = values
        else:
            arrays[f"{name}.weight" if name.endswith("sinks") else name] = values
    return arrays


def latents_apart(config: Config, weights: Arrays) -> Arrays:
    """Split the latent projection as `DeepseekV2Model.modify_tensors` does: a transposed key part
    and a value part.
    """
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    arrays: Arrays = {}
    for name, values in weights.items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if "kv_b_proj" not in name:
            arrays[name] = values
            continue
        of_heads = values.reshape(heads, -1, values.shape[-1])
        keys = of_heads[:, :plain].swapaxes(1, 2)
        arrays[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(keys)
        arrays[name.replace("kv_b_proj", "v_b_proj")] = np.ascontiguousarray(of_heads[:, plain:])
    return arrays


def stacked_experts(weights: Arrays) -> Arrays:
    """Stack the experts of a layer: one tensor per matrix."""
    arrays: Arrays = {}
    experts: dict[str, Arrays] = {}
    for name, values in weights.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if expert is None:
            arrays[name] = values
            continue
        merged = f"{expert[1]}.{expert[3]}"
        # `LlamaModel`'s names for Mixtral
        merged = re.sub(r"^model\.(.*)\.block_sparse_moe\.", r"\1.feed_forward.", merged)
        experts.setdefault(merged, {})[expert[2]] = values
    for merged, stacked in experts.items():
        arrays[merged] = np.stack([stacked[number] for number in sorted(stacked, key=int)])
    return arrays


def _rope(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    return rope.get("full_attention", rope)


def llama3_factors(rope: Config, head_dim: int) -> np.ndarray:
    """Return the divisor of each rotary frequency (`LlamaModel.generate_extra_tensors`)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    factors: list[float] = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def metadata_of(architecture: str, config: Config) -> dict[str, Any]:
    """Return the metadata that `TextModel.set_gguf_parameters` and its subclasses write."""
    rope = _rope(config)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("norm_eps")),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": rope["rope_theta"],
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "file_type": None,
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        keys |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    return keys | _EXTRA.get(architecture, lambda config: {})(config)


def _llama(config: Config) -> dict[str, Any]:
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": _head_dim(config)}


def _head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _granite(config: Config) -> dict[str, Any]:
    return _llama(config) | {
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _granitemoe(config: Config) -> dict[str, Any]:
    return _granite(config) | {
        "expert_shared_feed_forward_length": config.get("shared_intermediate_size")
    }


def _qwen2moe(config: Config) -> dict[str, Any]:
    return {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}


def _mistral3(config: Config) -> dict[str, Any]:
    rope = _rope(config)
    return _llama(config) | {
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
    }


def _glm4(config: Config) -> dict[str, Any]:
    return {"rope.dimension_count": int(_head_dim(config) * _rope(config)["partial_rotary_factor"])}


def _qwen35(config: Config) -> dict[str, Any]:
    """Return the metadata of `Qwen3NextModel` and `_Qwen35MRopeMixin`."""
    kinds, heads = config["layer_types"], config["linear_num_value_heads"]
    return _glm4(config) | {
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": config["linear_value_head_dim"] * heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
        "full_attention_interval": 4,
    }


def _gpt_oss(config: Config) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _lfm2(config: Config) -> dict[str, Any]:
    assert not config["block_auto_adjust_ff_dim"]
    heads = config["num_key_value_heads"]
    return {
        "vocab_size": config["vocab_size"],
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.head_count_kv": [
            heads if kind == "full_attention" else 0 for kind in config["layer_types"]
        ],
    }


def _gemma(config: Config) -> dict[str, Any]:
    return {"rope.freq_base": None}


def _deepseek2(config: Config) -> dict[str, Any]:
    """Return the metadata of `DeepseekV2Model` since April 2025, with expert groups since
    September.
    """
    rope, is_v3 = _rope(config), config["model_type"] == "deepseek_v3"
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    mscale = rope.get("mscale_all_dim")
    return {
        "vocab_size": config["vocab_size"],
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotary,
        "rope.scaling.yarn_log_multiplier": None if mscale is None else 0.1 * mscale,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] or None,
        "expert_gating_func": 2 if is_v3 else 1,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def _windows(config: Config) -> dict[str, Any]:
    """Return the window metadata of `Olmo2Model` and `Exaone4Model`."""
    if config.get("sliding_window") is None:
        return {}
    kinds = config["layer_types"]
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
    }


def _phi3(config: Config) -> dict[str, Any]:
    return {
        "attention.key_length": None,
        "attention.value_length": None,
        "rope.dimension_count": _head_dim(config),
        "rope.scaling.original_context_length": config["original_max_position_embeddings"],
        "attention.sliding_window": config.get("sliding_window") or 0,
    }


def _gemma2(config: Config) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**_gemma3(config), **{name: config[name] for name in caps}}


def _gemma3(config: Config) -> dict[str, Any]:
    return {"attention.sliding_window": config["sliding_window"]}


_EXTRA = {
    "llama": _llama,
    "smollm3": _llama,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "qwen2moe": _qwen2moe,
    "phi3": _phi3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "lfm2": _lfm2,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "mistral3": _mistral3,
    "glm4": _glm4,
    "qwen35": _qwen35,
    "olmo2": _windows,
    "exaone4": _windows,
}
