"""Valid values of config.json's numbers, names and lists: a table, checked before any computation.

Absent values and nulls pass. The code that reads a key decides if it may be absent.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nano_inference.errors import ModelLoadError
from nano_inference.fields.options import is_number, is_whole

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of value: its description in errors and its check."""

    description: str
    fits: Callable[[Any], bool]


def _whole(low: int, high: int) -> _Kind:
    return _Kind(
        f"an integer from {low} to {high}", lambda value: is_whole(value, low) and value <= high
    )


def is_finite(value: Any) -> bool:
    """Return True for numbers that are finite as floats: not for 10**400."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:
        return False


def _is_list_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(fits(each) for each in value)


def _is_token_id(value: Any) -> bool:
    return is_whole(value, 0) and value < 2**31


_POSITIVE = _Kind("a number above 0", lambda value: is_finite(value) and value > 0)
_EPS = _Kind("a number above 0 and below 1", lambda value: is_finite(value) and 0 < value < 1)
_BASE = _Kind("a number above 1", lambda value: is_finite(value) and value > 1)
_NOT_NEGATIVE = _Kind("a number of at least 0", lambda value: is_finite(value) and value >= 0)
_SWITCH = _Kind("true or false", lambda value: isinstance(value, bool))
_NAME = _Kind("a name", lambda value: isinstance(value, str))
_NAMES = _Kind(
    "a list of names", lambda value: _is_list_of(value, lambda each: isinstance(each, str))
)
_FLAGS = _Kind("a list of 0s and 1s", lambda value: _is_list_of(value, lambda each: each in (0, 1)))
_LAYERS = _Kind("a list of layer numbers", lambda value: _is_list_of(value, is_whole))
_ENDS = _Kind(
    "a token id or a list of them",
    lambda value: _is_token_id(value) or _is_list_of(value, _is_token_id),
)
_OBJECT = _Kind("an object", lambda value: isinstance(value, Mapping))
_OBJECTS = _Kind(
    "an object of objects",
    lambda value: isinstance(value, Mapping) and all(map(_OBJECT.fits, value.values())),
)

_PERIOD = _whole(0, 2**12)
_PATTERN = _Kind(
    f"{_PERIOD.description} or a name", lambda value: isinstance(value, str) or _PERIOD.fits(value)
)
_POSITIONS = _whole(1, 2**31 - 1)
_KINDS: Mapping[str, _Kind] = {
    "architectures": _NAMES,
    "hidden_size": _whole(1, 2**20),
    "intermediate_size": _whole(1, 2**24),
    "moe_intermediate_size": _whole(1, 2**24),
    "shared_expert_intermediate_size": _whole(1, 2**24),
    "shared_intermediate_size": _whole(0, 2**24),
    "num_hidden_layers": _whole(1, 2**12),
    "num_attention_heads": _whole(1, 2**16),
    "num_key_value_heads": _whole(1, 2**16),
    "head_dim": _whole(2, 2**16),
    "vocab_size": _whole(1, 2**26),
    "max_position_embeddings": _POSITIONS,
    "rms_norm_eps": _EPS,
    "norm_eps": _EPS,
    "tie_word_embeddings": _SWITCH,
    "attention_bias": _SWITCH,
    "qkv_bias": _SWITCH,
    "use_bias": _SWITCH,
    "use_qk_norm": _SWITCH,
    "attention_out_bias": _SWITCH,
    "torch_dtype": _NAME,
    "dtype": _NAME,
    "hidden_act": _NAME,
    "hidden_activation": _NAME,
    "eos_token_id": _ENDS,
    "layer_types": _NAMES,
    "mlp_layer_types": _NAMES,
    "use_sliding_window": _SWITCH,
    "sliding_window": _whole(0, 2**31 - 1),
    "sliding_window_pattern": _PATTERN,
    "max_window_layers": _whole(0, 2**12),
    "num_experts": _whole(0, 2**14),
    "num_local_experts": _whole(0, 2**14),
    "moe_num_experts": _whole(0, 2**14),
    "moe_num_shared_experts": _whole(0, 2**10),
    "moe_k": _whole(1, 2**14),
    "moe_layer_interval": _whole(1, 2**12),
    "moe_layer_start_index": _whole(0, 2**12),
    "moe_layer_end_index": _whole(-1, 2**12),
    "moe_norm_min": _NOT_NEGATIVE,
    "n_routed_experts": _whole(0, 2**14),
    "n_shared_experts": _whole(0, 2**10),
    "num_experts_per_tok": _whole(1, 2**14),
    "n_group": _whole(1, 2**14),
    "topk_group": _whole(1, 2**14),
    "topk_method": _NAME,
    "routed_scaling_factor": _POSITIVE,
    "first_k_dense_replace": _whole(0, 2**12),
    "moe_layer_freq": _whole(1, 2**12),
    "num_nextn_predict_layers": _whole(0, 2**6),
    "kv_lora_rank": _whole(1, 2**16),
    "q_lora_rank": _whole(1, 2**16),
    "qk_rope_head_dim": _whole(2, 2**16),
    "qk_nope_head_dim": _whole(1, 2**16),
    "v_head_dim": _whole(1, 2**16),
    "rope_interleave": _SWITCH,
    "decoder_sparse_step": _whole(1, 2**12),
    "full_attention_interval": _whole(1, 2**12),
    "full_attn_idxs": _LAYERS,
    "linear_num_key_heads": _whole(1, 2**16),
    "linear_num_value_heads": _whole(1, 2**16),
    "linear_key_head_dim": _whole(1, 2**16),
    "linear_value_head_dim": _whole(1, 2**16),
    "linear_conv_kernel_dim": _whole(1, 2**12),
    "nano_inference_heads_in_tiles": _SWITCH,
    "conv_L_cache": _whole(1, 2**12),
    "conv_bias": _SWITCH,
    "block_ff_dim": _whole(1, 2**24),
    "block_multiple_of": _whole(1, 2**24),
    "block_ffn_dim_multiplier": _POSITIVE,
    "block_auto_adjust_ff_dim": _SWITCH,
    "mlp_only_layers": _LAYERS,
    "norm_topk_prob": _SWITCH,
    "global_head_dim": _whole(2, 2**16),
    "num_global_key_value_heads": _whole(1, 2**16),
    "attention_k_eq_v": _SWITCH,
    "num_kv_shared_layers": _whole(0, 2**12),
    "use_double_wide_mlp": _SWITCH,
    "enable_moe_block": _SWITCH,
    "top_k_experts": _whole(1, 2**14),
    "hidden_size_per_layer_input": _whole(0, 2**16),
    "vocab_size_per_layer_input": _whole(1, 2**26),
    "query_pre_attn_scalar": _POSITIVE,
    "attn_logit_softcapping": _POSITIVE,
    "final_logit_softcapping": _POSITIVE,
    "embedding_multiplier": _POSITIVE,
    "attention_multiplier": _POSITIVE,
    "residual_multiplier": _POSITIVE,
    "logits_scaling": _POSITIVE,
    "no_rope_layers": _FLAGS,
    "no_rope_layer_interval": _whole(1, 2**12),
    "rope_theta": _BASE,
    "rope_local_base_freq": _BASE,
    "partial_rotary_factor": _POSITIVE,
    "text_config": _OBJECT,
    "per_layer_config": _OBJECTS,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
}
_ROPE_KINDS: Mapping[str, _Kind] = {
    "rope_type": _NAME,
    "type": _NAME,
    "rope_theta": _BASE,
    "factor": _POSITIVE,
    "partial_rotary_factor": _POSITIVE,
    "original_max_position_embeddings": _POSITIONS,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "truncate": _SWITCH,
    "attention_factor": _POSITIVE,
    "llama_4_scaling_beta": _NOT_NEGATIVE,
    "mscale": _NOT_NEGATIVE,
    "mscale_all_dim": _NOT_NEGATIVE,
    "short_factor": _Kind(
        "a list of numbers above 0", lambda value: _is_list_of(value, _POSITIVE.fits)
    ),
    "long_factor": _Kind(
        "a list of numbers above 0", lambda value: _is_list_of(value, _POSITIVE.fits)
    ),
    "full_attention": _OBJECT,
    "sliding_attention": _OBJECT,
}
SHOWN = 60  # characters of a value in an error


def check_values(config: Config, file: str = "config.json") -> None:
    """Raise `ModelLoadError` naming the first value of a wrong kind or out of range."""
    _check(config, _KINDS, file)
    for name in ("rope_parameters", "rope_scaling"):
        if config.get(name) is not None:
            _check_rope(config[name], f"{file}: {name}")
    for layer, fields in (config.get("per_layer_config") or {}).items():
        _check(fields, _KINDS, f"{file}: per_layer_config: {layer}")


def _check_rope(fields: Config, where: str) -> None:
    """Check one description of rotary embedding, or one for each kind of layer."""
    _check(fields, _ROPE_KINDS, where)
    for name in ("full_attention", "sliding_attention"):
        if fields.get(name) is not None:
            _check(fields[name], _ROPE_KINDS, f"{where}: {name}")


def whole(config: Config, name: str) -> int:
    """Return a number that a model must have. Raises `KeyError` if it is absent or null."""
    if config.get(name) is None:
        raise KeyError(name)
    return int(config[name])


def check_end_ids(generation_config: Config) -> None:
    """Check the token ids of generation_config.json that end a sample."""
    _check(generation_config, {"eos_token_id": _ENDS}, "generation_config.json")


def _check(values: Config, kinds: Mapping[str, _Kind], where: str) -> None:
    for name, kind in kinds.items():
        value = values.get(name)
        if value is not None and not kind.fits(value):
            raise ModelLoadError(
                f"{where} has {name}={shown(value)}; it must be {kind.description}."
            )


def shown(value: Any) -> str:
    """Return the text of a value, shortened for an error."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
