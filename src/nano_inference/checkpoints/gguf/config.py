"""Hugging Face's `config.json` and tensor names, from the metadata of a GGUF file."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nano_inference.checkpoints.gguf.codes import numbers_of
from nano_inference.checkpoints.gguf.families import (
    OPTIONAL_NAMES,
    QUERY_BETA,
    ROPE_FREQS,
    ROPE_LONG,
    ROPE_SHORT,
    WINDOW_PATTERN,
    Config,
    Family,
)
from nano_inference.checkpoints.gguf.header import StoredTensor
from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import check_values

Stored = Mapping[str, StoredTensor]

_TOKEN_ID_KEYS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}
# Ids that end a turn, and also a sample if the file has a chat template.
_TURN_ENDS = ("eot_token_id", "eom_token_id")

_YARN: Mapping[str, str] = {
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_YARN_LOG = "yarn_log_multiplier"
_ROPE_SCALING = (
    *("type", "factor", "original_context_length", "attn_factor", "yarn_ext_factor", _YARN_LOG),
)
# Keys with special handling below, and keys without effect.
_COMMON_KEYS = frozenset(
    {"vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length"}
    | {"rope.dimension_count", "rope.scaling.finetuned", "tensor_data_layout"}
    | {f"rope.scaling.{key}" for key in (*_ROPE_SCALING, *_YARN)}
)
_HEADS_OF_LATENTS = frozenset({"attention.key_length_mla", "attention.value_length_mla"})
# Keys for which 0 means absence.
_NONE_AT_ZERO = frozenset(
    {"attention.sliding_window", "expert_count", "expert_used_count", "expert_shared_count"}
    | {"expert_weights_norm", "expert_gating_func", "leading_dense_block_count"}
    | {"nextn_predict_layers"}
)


def hf_config(family: Family, metadata: Mapping[str, Any], stored: Stored) -> Config:
    """Return Hugging Face's `config.json` for the metadata.

    Raises `ModelLoadError` for a key of the architecture that no table lists.
    """
    name = str(metadata["general.architecture"])
    values = {
        key.removeprefix(f"{name}."): value
        for key, value in metadata.items()
        if key.startswith(f"{name}.")
    }
    values = {key: value for key, value in values.items() if value or key not in _NONE_AT_ZERO}
    _require_known(family, name, values)
    values.setdefault("attention.head_count_kv", values.get("attention.head_count"))
    kinds = _layer_kinds(family, values)
    config_keys = {
        **family.config_keys,
        **{key: to for key, to in family.optional_keys.items() if key in values},
    }
    if isinstance(values.get(WINDOW_PATTERN), list):
        config_keys.pop(WINDOW_PATTERN, None)
    for key in (*config_keys, "attention.head_count_kv"):
        # a list would contain one number per layer
        if not isinstance(value := values.get(key), int | float) or value <= 0:
            raise ModelLoadError(
                f"the GGUF metadata key {name}.{key} is {value}; expected one positive number"
            )
    embedding = stored.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError("the GGUF file has no tensor token_embd.weight")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "rope_theta": 10000.0,  # llama.cpp's default
        **{hf_key: values[key] for key, hf_key in config_keys.items()},
        "num_key_value_heads": values["attention.head_count_kv"],
        **_heads(family, name, values),
        **family.combined(values),
        **_rope_scaling(family, name, values, stored),
        **kinds,
        **{key: f"blk.0.{tensor}" in stored for tensor, key in family.switches.items()},
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in stored,
        **_token_ids(family, metadata),
        "torch_dtype": _DTYPES.get(embedding.kind, "bfloat16"),
        # the loader selects a dtype by this key: torch_dtype above is only the storage type
        "nano_inference_converted_from": "gguf",
    }
    if QUERY_BETA in config:
        scaling = config.setdefault("rope_scaling", {"rope_type": "default"})
        scaling[QUERY_BETA] = config.pop(QUERY_BETA)
    if family.unscaled_in_windows:
        config |= _ropes_by_window(config)
    check_values(config, "the GGUF metadata")  # before defaults are computed from them
    return {**family.defaults(config), **config}


def _require_known(family: Family, name: str, values: Mapping[str, Any]) -> None:
    """Raise `ModelLoadError` for a key that no table lists, or an unsupported value."""
    known = family.config_keys.keys() | family.optional_keys.keys() | _COMMON_KEYS
    known |= family.constants.keys() | family.combined_keys | family.unread
    if family.heads is not None:
        known |= _HEADS_OF_LATENTS
    for key, value in family.constants.items():
        if values.get(key, value) != value:
            raise ModelLoadError(
                f"the GGUF metadata key {name}.{key} is {values[key]}; expected {value}"
            )
    if isinstance(values.get(WINDOW_PATTERN), list):
        known |= {WINDOW_PATTERN}
    if unknown := sorted(values.keys() - known):
        raise ModelLoadError(f"the GGUF metadata key {name}.{unknown[0]} is not supported")


def _ropes_by_window(config: Config) -> Config:
    """Return transformers' rotary parameters if only layers without a window are scaled."""
    default = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    full = {**default, **config.pop("rope_scaling", {})}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": default}}


_DTYPES = {"F32": "float32", "F16": "float16"}


def _layer_kinds(family: Family, values: dict[str, Any]) -> Config:
    """Return the layer types, if a list marks the layers with a window or without keys.

    In `values`, a list of key head counts is replaced by its only count other than 0.
    """
    heads = values["attention.head_count_kv"]
    if family.keyless_layers is not None and isinstance(heads, list) and len({*heads} - {0}) == 1:
        values["attention.head_count_kv"] = max(heads)
        kinds = ["full_attention" if head_count else family.keyless_layers for head_count in heads]
        return {"layer_types": kinds}
    pattern = values.get(WINDOW_PATTERN)
    if not isinstance(pattern, list):
        return {}
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return {"layer_types": kinds}


def _token_ids(family: Family, metadata: Mapping[str, Any]) -> Config:
    def value_of(key: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}")

    ids = {to: value_of(key) for key, to in _TOKEN_ID_KEYS.items() if value_of(key) is not None}
    if "tokenizer.chat_template" in metadata:
        ends = {value_of(key) for key in ("eos_token_id", *_TURN_ENDS)} - {None}
        ends |= set(family.chat_eos_ids)
        if len(ends) > 1:
            ids["eos_token_id"] = sorted(ends)
    return ids


def _heads(family: Family, name: str, values: Mapping[str, Any]) -> Config:
    if family.heads is not None:
        return family.heads(values)
    head_dim = values.get(
        "attention.key_length", values["embedding_length"] // values["attention.head_count"]
    )
    rotary = values.get("rope.dimension_count", head_dim)
    if family.partial_rotary is not None:
        part = rotary / head_dim
        usual = part == family.partial_rotary == 1.0  # the decoder's own default
        return {"head_dim": head_dim} | ({} if usual else {"partial_rotary_factor": part})
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            raise ModelLoadError(
                f"the GGUF metadata key {name}.{key} is {values[key]}; expected the head "
                f"dimension, {head_dim}"
            )
    return {"head_dim": head_dim}


def _rope_scaling(family: Family, name: str, values: Mapping[str, Any], stored: Stored) -> Config:
    settings = {
        key: values[f"rope.scaling.{key}"]
        for key in (*_ROPE_SCALING, *_YARN)
        if f"rope.scaling.{key}" in values
    }
    factors = sorted(family.rope_factors & stored.keys())
    # llama.cpp treats a factor without a type as linear.
    kind = settings.get("type", "linear" if "factor" in settings else "none")
    if factors == [ROPE_FREQS] and kind == "none":
        return _rope_freqs(values, stored[ROPE_FREQS])
    if factors == [ROPE_LONG, ROPE_SHORT] and kind in ("none", "longrope"):
        return _long_rope(values, settings, stored)
    if factors:
        raise ModelLoadError(
            f"the GGUF file has both {factors[0]} and rope.scaling metadata; only one is supported"
        )
    if kind == "none":
        return {}
    mapped = kind in ("linear", "yarn") and "factor" in settings
    if not mapped or settings.get("yarn_ext_factor", 1) != 1:
        raise ModelLoadError(
            f"{name}.rope.scaling is {settings}; supported are the types none, linear and yarn, "
            "with a factor and without yarn_ext_factor"
        )
    scaling = {"rope_type": kind, "factor": settings["factor"]}
    if kind == "yarn":
        scaling |= {to: settings[key] for key, to in _YARN.items() if key in settings}
        scaling |= family.yarn
        if _YARN_LOG in settings:
            scaling |= family.mscales(settings[_YARN_LOG])
        original = settings.get("original_context_length", values["context_length"])
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _rope_freqs(values: Mapping[str, Any], stored: StoredTensor) -> Config:
    """Return the scaling for a tensor that divides the rotary frequencies.

    Llama since 3.1 stores its scaling this way, without metadata. transformers' equivalent is
    longrope with equal factors at all lengths.
    """
    factors = _factors(values, stored)
    if set(factors) == {1.0}:
        return {}
    scaling = {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": values["context_length"],
    }
    return {"rope_scaling": scaling}


def _long_rope(values: Mapping[str, Any], settings: Mapping[str, Any], stored: Stored) -> Config:
    """Return Phi's scaling, whose factors differ between short and long sequences."""
    original = settings.get("original_context_length", values["context_length"])
    scaling = {
        "rope_type": "longrope",
        "factor": values["context_length"] / original,
        "short_factor": _factors(values, stored[ROPE_SHORT]),
        "long_factor": _factors(values, stored[ROPE_LONG]),
        "original_max_position_embeddings": original,
    }
    if "attn_factor" in settings:
        scaling["attention_factor"] = settings["attn_factor"]
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _factors(values: Mapping[str, Any], stored: StoredTensor) -> list[float]:
    factors = numbers_of(stored.kind, stored.rows(), stored.shape[-1]).reshape(-1)
    head_dim = values.get(
        "attention.key_length", values["embedding_length"] // values["attention.head_count"]
    )
    size = values.get("rope.dimension_count", head_dim) // 2
    if len(factors) != size or not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelLoadError(
            f"the GGUF tensor {stored.name} must hold {size} numbers above 0, half of head_dim"
        )
    return [float(factor) for factor in factors]


def require_names(family: Family, config: Config, stored: Stored) -> None:
    """Raise `ModelLoadError` for an unknown or missing tensor."""
    names = tensor_names(family, config)
    if unknown := sorted(stored.keys() - names.keys() - family.rope_factors):
        raise ModelLoadError(
            f"the GGUF tensor {unknown[0]} is not supported for {family.architecture}"
        )
    optional = OPTIONAL_NAMES | family.optional_names
    if missing := sorted(
        name for name in names.keys() - stored.keys() if kind_of(name) not in optional
    ):
        raise ModelLoadError(
            f"the GGUF file has no tensor {missing[0]}, which {family.architecture} needs"
        )


def tensor_names(family: Family, config: Config) -> dict[str, str]:
    """Return a map of GGUF to Hugging Face names of all possible tensors."""
    names = dict(family.global_names)
    for layer in range(config["num_hidden_layers"]):
        for key, hf_name in family.layer_names.items():
            names[f"blk.{layer}.{key}"] = f"model.layers.{layer}.{hf_name}"
    for number in range(config.get("mtp_num_hidden_layers", 0)):
        layer = f"blk.{config['num_hidden_layers'] + number}"
        for key, hf_name in family.layer_names.items():
            names[f"{layer}.{key}"] = f"mtp.layers.{number}.{hf_name}"
        names |= {f"{layer}.{key}": hf_name for key, hf_name in family.mtp_names.items()}
    return names


def kind_of(name: str) -> str:
    """Return a tensor's name without its layer: `blk.7.attn_q.weight` -> `attn_q.weight`."""
    return re.sub(r"^blk\.\d+\.", "", name)
