"""`ModelSpec`: a Hugging Face config.json read into the switches that the one decoder knows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nano_inference.errors import ModelLoadError

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv:2104.09864) and how its frequencies are stretched.

    Attributes:
        theta: base of the frequencies.
        kind: `"default"`, `"linear"`, `"llama3"` or `"yarn"` (arXiv:2309.00071).
        factor: how far the context is stretched.
        original_max_position: context that the model was first trained for (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band of interpolation.
        beta_fast, beta_slow, truncate: yarn's band of interpolation.
        attention_factor: multiplies cosine and sine.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that the decoder must know of a model; no tensors.

    Attributes:
        architecture: the class name in config.json.
        rms_norm_eps: added to the mean square before its root.
        tie_word_embeddings: the head is the embedding.
        max_position: tokens that the model was made for.
        eos_token_ids: ids that end a sample.
        checkpoint_dtype: name of the dtype that the checkpoint says it has.
        quantized_source: the checkpoint was made from a quantised file, so its dtype says nothing.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    quantized_source: bool = False


def spec_from_config(config: Config, generation_config: Config | None = None) -> ModelSpec:
    """Read config.json (and generation_config.json) of a model. Raises `ModelLoadError` for what the decoder lacks."""
    architectures = config.get("architectures") or []
    readers = [_ARCHITECTURES[name] for name in architectures if name in _ARCHITECTURES]
    if not readers:
        raise ModelLoadError(
            f"architecture {', '.join(architectures) or 'missing'} is not supported; the decoder knows "
            f"{', '.join(sorted(_ARCHITECTURES))}."
        )
    try:
        return readers[0](config, generation_config or {})
    except KeyError as missing:
        raise ModelLoadError(f"config.json lacks {missing.args[0]!r}.") from missing
    except (TypeError, ValueError, AttributeError) as problem:
        raise ModelLoadError(f"config.json holds a value of the wrong kind: {problem}.") from problem


def _llama(config: Config, generation_config: Config) -> ModelSpec:
    _require(config, "hidden_act", "silu")
    _require(config, "attention_bias", False)
    _require(config, "mlp_bias", False)
    num_heads = int(config["num_attention_heads"])
    max_position = int(config["max_position_embeddings"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly.")
    return ModelSpec(
        architecture=config["architectures"][0],
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // num_heads),
        vocab_size=int(config["vocab_size"]),
        max_position=max_position,
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope=_rope(config, max_position),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_ids(config, generation_config),
        checkpoint_dtype=str(config.get("torch_dtype") or config.get("dtype") or "float32"),
        quantized_source="nano_inference_converted_from" in config,
    )


_ARCHITECTURES: dict[str, Callable[[Config, Config], ModelSpec]] = {"LlamaForCausalLM": _llama}


def _require(config: Config, name: str, value: object) -> None:
    if config.get(name, value) != value:
        raise ModelLoadError(f"config.json has {name}={config[name]!r}; this decoder needs {value!r}.")


def _eos_ids(config: Config, generation_config: Config) -> tuple[int, ...]:
    found = generation_config.get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _rope(config: Config, max_position: int) -> RopeSpec:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    fields: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise ModelLoadError(f"rope scaling {kind!r} is not supported; the decoder knows {', '.join(_ROPE_KINDS)}.")
    if any(source.get("partial_rotary_factor", 1.0) != 1.0 for source in (fields, config)):
        raise ModelLoadError("partial_rotary_factor other than 1 is not supported.")
    theta = float(fields.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeSpec(theta=theta)
    original = int(fields.get("original_max_position_embeddings") or max_position)
    factor = float(fields.get("factor") or max_position / original)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=original,
            low_freq_factor=float(fields["low_freq_factor"]),
            high_freq_factor=float(fields["high_freq_factor"]),
        )
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=float(fields.get("beta_fast") or 32),
        beta_slow=float(fields.get("beta_slow") or 1),
        truncate=bool(fields.get("truncate", True)),
        attention_factor=_yarn_attention_factor(fields, factor),
    )


_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def _yarn_attention_factor(fields: Config, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return mscale(float(fields["mscale"])) / mscale(float(fields["mscale_all_dim"]))
    return mscale(1.0)
