"""Translation of config.json into a `ModelSpec`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, check_end_ids, check_values
from nano_inference.models.spec.families import ARCHITECTURES, CAPS, Family
from nano_inference.models.spec.latents import LatentSpec
from nano_inference.models.spec.layers import LayerSpec
from nano_inference.models.spec.model import Activation, ModelSpec
from nano_inference.models.spec.quantisation import read_quantisation
from nano_inference.models.spec.refused import refusal
from nano_inference.models.spec.rope import RopeSpec
from nano_inference.models.spec.text_part import other_names

CONVERTED = "nano_inference_converted_from"  # key in config.json of converted .gguf files


def spec_from_config(
    config: Config, generation_config: Config | None = None, folder: Path | None = None
) -> ModelSpec:
    """Read config.json and generation_config.json of a model.

    Files next to them in `folder` may declare a quantization. Raises `ModelLoadError` if the
    decoder lacks a feature, the quantization is unknown, or a value is invalid.
    """
    check_values({"architectures": config.get("architectures")})
    architectures = config.get("architectures") or []
    known = [name for name in architectures if name in ARCHITECTURES]
    if not known:
        raise ModelLoadError(refusal(architectures, ARCHITECTURES))
    check_values(config)
    check_end_ids(generation_config or {})
    quantisation = read_quantisation(config, folder)
    try:
        spec = _read(known[0], ARCHITECTURES[known[0]], config, generation_config or {})
    except KeyError as missing:
        raise ModelLoadError(f"config.json lacks {missing.args[0]!r}.") from missing
    except (TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        raise ModelLoadError(
            f"config.json holds a value of the wrong kind: {problem}."
        ) from problem
    return replace(spec, quantisation=quantisation)


def _read(
    architecture: str, family: Family, config: Config, generation_config: Config
) -> ModelSpec:
    config = _checked(config, family)
    num_layers = int(config["num_hidden_layers"])
    latent = family.latent(config)
    num_heads, num_kv_heads, head_dim = _heads(config, latent)
    max_position = int(config["max_position_embeddings"])
    qkv_bias, o_bias = family.biases(config)
    windows = (0,) * num_layers
    if family.windows is not None and _is_on(config, family.windows_if):
        windows = family.windows(config, num_layers)
    ropes, kinds = family.ropes(config, max_position, windows), family.kinds(config, windows)
    for kind in kinds:
        _check_heads(num_heads, kind.num_kv_heads, kind.head_dim)
    for layer, rope in enumerate(ropes):
        _check_rope(rope, kinds[layer].head_dim if kinds else head_dim, architecture, family)
    scales: dict[str, Any] = {"attention_scale": head_dim**-0.5} | family.scales(config)
    scales |= {CAPS[name]: float(config.get(name) or 0) for name in family.caps}
    return ModelSpec(
        architecture=architecture,
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(config["vocab_size"]),
        max_position=max_position,
        rms_norm_eps=float(config["rms_norm_eps"]),
        ropes=ropes,
        windows=windows,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tied_by_default)),
        eos_token_ids=_eos_ids(config, generation_config),
        checkpoint_dtype=str(config.get("torch_dtype") or config.get("dtype") or "float32"),
        quantized_source=CONVERTED in config,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=family.qk_norm if _is_on(config, family.qk_norm_if) else None,
        attention_sinks=family.attention_sinks,
        norms=family.norms,
        norm_offset=family.norm_offset,
        bare_norms=family.bare_norms,
        embed_norm=family.embed_norm,
        activation=_activation(config, family),
        fused_qkv=family.fused_qkv,
        fused_gate_up=family.fused_gate_up,
        moe=family.moe(config, num_layers),
        state=family.state(config, num_layers),
        gated_attention=family.gated_attention,
        renamed=family.renamed,
        is_text_part=family.is_text_part,
        latent=latent,
        unused=(*family.unused, *_unused(config, num_layers), *_unread(kinds, family)),
        kinds=kinds,
        **scales,
        **family.extras(config),
    )


def _checked(config: Config, family: Family) -> Config:
    """Rename keys to those of other families, and check the result.

    Raises `KeyError` if a key is missing, and `ModelLoadError`.
    """
    config = family.read(config)
    check_values(config)  # again, under the new names
    for name in _UNSUPPORTED:
        if config.get(name) and name not in family.caps:
            raise ModelLoadError(
                f"config.json has {name}={config[name]!r}; {name} is not supported for this model."
            )
    if missing := [name for name in _REQUIRED if config.get(name) is None]:
        raise KeyError(missing[0])
    return config


def _heads(config: Config, latent: LatentSpec | None) -> tuple[int, int, int]:
    """Return the numbers of heads and of key-value heads, and the width of a head."""
    num_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.sizes.key
    _check_heads(num_heads, num_kv_heads, head_dim)
    return num_heads, num_kv_heads, head_dim


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly."
        )
    if head_dim < 2 or head_dim % 2:
        raise ModelLoadError(
            f"head_dim={head_dim} must be even and at least 2: rotary embedding rotates pairs."
        )


def _check_rope(rope: RopeSpec, head_dim: int, architecture: str, family: Family) -> None:
    """Check a rotary embedding against the width of heads."""
    if rope.share != 1 and not family.partial_rotary:
        raise ModelLoadError(
            f"partial_rotary_factor={rope.share:g} is not supported for {architecture}; it must be "
            "1."
        )
    turning = rope.turning(head_dim)
    if turning < 2 or turning % 2 or turning > head_dim:
        raise ModelLoadError(
            f"partial_rotary_factor={rope.share:g} rotates {turning} of {head_dim} dimensions of a "
            "head; the number must be even and from 2 to head_dim."
        )
    if rope.factors and len(rope.factors) != turning // 2:
        raise ModelLoadError(
            f"rope scaling has {len(rope.factors)} factors; heads of {head_dim} dimensions need "
            f"{turning // 2}."
        )


def _is_on(config: Config, switch: str | None) -> bool:
    return switch is None or bool(config.get(switch))


_REQUIRED = (
    *("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps"),
)
_UNSUPPORTED = (
    "mlp_bias",
    "clip_qkv",
    *CAPS,
    "use_bidirectional_attention",
)


def _activation(config: Config, family: Family) -> Activation:
    key, known = family.activation_key, family.activations
    name = config.get(key) or "silu"
    if name not in known:
        raise ModelLoadError(
            f"config.json has {key}={name!r}; it must be one of {', '.join(known)}."
        )
    return known[name]


def _unused(config: Config, num_layers: int) -> tuple[str, ...]:
    """Return prefixes of tensors for multi-token prediction: layers after the last, and Ernie's."""
    count = int(config.get("num_nextn_predict_layers") or 0)
    extra = tuple(f"model.layers.{num_layers + layer}." for layer in range(count))
    return (*extra, "model.mtp_") if count else ()


def _unread(kinds: tuple[LayerSpec, ...], family: Family) -> tuple[str, ...]:
    """Return prefixes of key and value tensors in layers that read another layer's instead."""
    names = [
        f"model.layers.{layer}.self_attn.{part}."
        for layer, kind in enumerate(kinds)
        if kind.keys_of != layer
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    others = [other for name in names for other in other_names(name)] if family.is_text_part else []
    return (*names, *others)


def _eos_ids(config: Config, generation_config: Config) -> tuple[int, ...]:
    eos_ids = generation_config.get("eos_token_id", config.get("eos_token_id"))
    if eos_ids is None:
        return ()
    return tuple(eos_ids) if isinstance(eos_ids, list) else (int(eos_ids),)
