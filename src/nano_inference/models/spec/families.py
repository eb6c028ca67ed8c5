"""Families of models: one row for each class name of config.json.

A row holds facts that config.json omits, and functions that read family-specific keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, shown
from nano_inference.models.spec.experts import (
    MoeSpec,
    deepseek_v2_experts,
    deepseek_v3_experts,
    ernie_experts,
    gemma4_experts,
    glm4_moe_lite_experts,
    gpt_oss_experts,
    granite_experts,
    mixtral_experts,
    olmoe_experts,
    qwen2_experts,
    qwen_experts,
)
from nano_inference.models.spec.latents import LatentSpec, latent_ropes, latent_scale, read_latent
from nano_inference.models.spec.layers import LayerSpec, gemma4_layers
from nano_inference.models.spec.model import Activation, NormPlacement, QkNorm
from nano_inference.models.spec.mtp import DEEPSEEK, MIMO, QWEN, MtpSpec
from nano_inference.models.spec.rope import (
    ReadRopes,
    interleaved_ropes,
    ropes_backwards,
    ropes_but_for_some,
    ropes_by_window,
    ropes_in_windows_alone,
    ropes_unscaled_in_windows,
    turning_layers,
)
from nano_inference.models.spec.states import StateSpec, delta_net, short_conv
from nano_inference.models.spec.text_part import gemma3_text_config, text_config

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _every_bias(config: Config, usual: bool = False) -> tuple[bool, bool]:
    every = bool(config.get("attention_bias", usual))
    return every, every


def _input_biases(config: Config) -> tuple[bool, bool]:
    return bool(config.get("attention_bias", False)), False


def _ernie_biases(config: Config) -> tuple[bool, bool]:
    if config.get("use_bias"):
        raise ModelLoadError("config.json has use_bias=True; biases of MLPs are not supported.")
    return False, False


@dataclass(frozen=True, slots=True)
class Family:
    """Facts that follow from an architecture's name, not from its config.json."""

    # config -> True if q, k and v have biases, True if the output projection has one
    biases: Callable[[Config], tuple[bool, bool]] = _every_bias
    qk_norm: QkNorm | None = None
    qk_norm_if: str | None = None  # switch in config.json for `qk_norm` (None: always on)
    attention_sinks: bool = False
    norms: NormPlacement = "pre"
    norm_offset: float = 0.0
    activation_key: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: _ACTIVATIONS)
    fused_qkv: bool = False
    fused_gate_up: bool = False
    tied_by_default: bool = False
    bare_norms: bool = False
    embed_norm: bool = False
    caps: tuple[str, ...] = ()  # keys of `CAPS` that config.json may have
    # (config, number of layers) -> window of each layer. None: no windows
    windows: Callable[[Config, int], tuple[int, ...]] | None = None
    windows_if: str | None = None  # switch in config.json for `windows` (None: always on)
    ropes: ReadRopes = ropes_by_window
    partial_rotary: bool = False  # partial_rotary_factor may be below 1
    scales: Callable[[Config], dict[str, float]] = lambda _: {}
    # (config, number of layers)
    moe: Callable[[Config, int], MoeSpec | None] = lambda _, __: None
    state: Callable[[Config, int], StateSpec | None] = lambda _, __: None
    gated_attention: bool = False
    unused: tuple[str, ...] = ()
    mtp: MtpSpec | None = None  # multi-token prediction layer that can draft
    renamed: tuple[tuple[str, str], ...] = ()
    is_text_part: bool = False
    # config -> config with the keys of other families, and with defaults
    read: Callable[[Config], Config] = lambda config: config
    latent: Callable[[Config], LatentSpec | None] = lambda _: None
    # (config, windows) -> sizes of each layer. Empty: all layers are alike
    kinds: Callable[[Config, tuple[int, ...]], tuple[LayerSpec, ...]] = lambda _, __: ()
    # config -> fields of `ModelSpec` that only this family sets
    extras: Callable[[Config], dict[str, Any]] = lambda _: {}


# Defaults of transformers for Gemma 4.
_USUAL: Config = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
# Other defaults of the classes whose text model reads all modalities.
_UNIFIED: Config = {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_ROPES: Config = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def gemma4_config(config: Config) -> Config:
    """Add defaults to a config of Gemma 4. The last layer always has full attention."""
    unified = any("Unified" in name for name in config["architectures"])
    usual = {**_USUAL, **(_UNIFIED if unified else {})}
    values = {name: value for name, value in config.items() if value is not None}
    read = {**usual, "rope_parameters": _ROPES, **values}
    if types := read.get("layer_types"):
        read["layer_types"] = [*types[:-1], "full_attention"]
    else:
        last = read["num_hidden_layers"] - 1
        read["layer_types"] = [
            "sliding_attention" if (layer + 1) % 6 and layer < last else "full_attention"
            for layer in range(last + 1)
        ]
    if read.get("use_bidirectional_attention") == "vision":  # for images only
        del read["use_bidirectional_attention"]
    return read


def gemma4_text_config(config: Config) -> Config:
    """Add defaults to the text part of a class that also reads images or audio."""
    return gemma4_config(text_config(config))


def _uniform_window(config: Config, num_layers: int) -> tuple[int, ...]:
    """Use the same `sliding_window` in every layer, unless `layer_types` differs."""
    return _windows(config, ["sliding_attention"] * num_layers)


def _upper_windows(config: Config, num_layers: int) -> tuple[int, ...]:
    """Qwen: use windows in the layers from `max_window_layers` on."""
    first = int(config.get("max_window_layers", num_layers))
    return _windows(
        config, ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    )


def _alternating_windows(
    config: Config, num_layers: int, usual: int, nth: int = 0
) -> tuple[int, ...]:
    """Give every layer a window, except one in each period: the last one, or number `nth`."""
    # transformers itself ignores "_sliding_window_pattern", which it writes
    pattern = config.get("sliding_window_pattern")
    if pattern == 0 and not config.get("layer_types"):
        raise ModelLoadError(
            "config.json has sliding_window_pattern=0; without layer_types it must be above 0."
        )
    period = pattern if isinstance(pattern, int) and pattern else usual
    return _windows(
        config,
        [
            "full_attention" if (i + 1) % period == nth else "sliding_attention"
            for i in range(num_layers)
        ],
    )


def _windows_without_rope(config: Config, num_layers: int) -> tuple[int, ...]:
    """SmolLM3: use windows in the layers without rotary embedding, unless `layer_types` differs."""
    turning = turning_layers(config, num_layers)
    return _windows(config, ["full_attention" if each else "sliding_attention" for each in turning])


def _windows(config: Config, default_types: list[str]) -> tuple[int, ...]:
    types = config.get("layer_types") or default_types
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown or len(types) != len(default_types):
        raise ModelLoadError(
            f"config.json has layer_types {shown(types)}; it must have {len(default_types)} "
            "entries, each 'full_attention' or 'sliding_attention'."
        )
    window = int(config.get("sliding_window") or 0)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


CAPS = {"attn_logit_softcapping": "attention_cap", "final_logit_softcapping": "logits_cap"}


def _gemma_scales(config: Config) -> dict[str, float]:
    return {
        "embed_scale": float(config["hidden_size"]) ** 0.5,
        "attention_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
    }


def _gemma2(config: Config) -> Config:
    """Add the caps of Gemma 2 if config.json does not have them."""
    return {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}


def _granite_scales(config: Config) -> dict[str, float]:
    return {
        "embed_scale": float(config.get("embedding_multiplier", 1.0)),
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "logits_divisor": float(config.get("logits_scaling", 1.0)),
    }


def _gemma4_extras(config: Config) -> dict[str, Any]:
    """Read the layers' inputs. Raises `ModelLoadError` if some tokens have none."""
    width, known = int(config["hidden_size_per_layer_input"]), config["vocab_size_per_layer_input"]
    if width and known < config["vocab_size"]:
        raise ModelLoadError(
            f"config.json has vocab_size_per_layer_input={known}; it must be at least the "
            f"vocabulary size ({config['vocab_size']})."
        )
    inputs = {"layer_inputs": width, "layer_vocab": known} if width else {}
    return {"value_norm": True, "layer_scales": True, **inputs}


# The first release of Gemma writes "gelu" but means the tanh approximation.
_GEMMA_ACTIVATIONS: dict[str, Activation] = {**_ACTIVATIONS, "gelu": "gelu_tanh"}


def _lfm2(config: Config) -> Config:
    """Rename LFM2's epsilon and MLP width, and adjust the width as transformers does."""
    inner = int(config["block_ff_dim"] if "block_ff_dim" in config else config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim", True):
        unit = int(config.get("block_multiple_of", 256))
        inner = int(2 * inner / 3)
        factor = config.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            inner = -(-int(factor * inner) // unit) * unit
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    renamed = {"rms_norm_eps": config["norm_eps"], "intermediate_size": inner}
    return {**config, **renamed, "tie_word_embeddings": tied}


def _partly_turning(config: Config, share: float) -> Config:
    """Set the rotated share of a head if config.json does not."""
    return {"partial_rotary_factor": share, **config}


_quarter_turning = partial(_partly_turning, share=0.25)  # Qwen3-Next and Qwen3.5


_LATENT = Family(latent=read_latent, ropes=latent_ropes, partial_rotary=True, scales=latent_scale)

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows=_uniform_window),
    "MinistralForCausalLM": Family(windows=_uniform_window),
    "CwmForCausalLM": Family(windows=partial(_alternating_windows, usual=4, nth=1)),
    "SeedOssForCausalLM": Family(
        biases=lambda config: (
            bool(config.get("attention_bias", True)),
            bool(config.get("attention_out_bias", False)),
        )
    ),
    "Ministral3ForCausalLM": Family(windows=_uniform_window),
    "HeliumForCausalLM": Family(biases=_input_biases, ropes=interleaved_ropes),
    "Ernie4_5ForCausalLM": Family(
        biases=_ernie_biases, tied_by_default=True, ropes=interleaved_ropes
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        biases=_ernie_biases, tied_by_default=True, ropes=interleaved_ropes, moe=ernie_experts
    ),
    "Dots1ForCausalLM": Family(qk_norm="head", windows=_uniform_window, moe=deepseek_v3_experts),
    "GlmForCausalLM": Family(
        biases=_input_biases, fused_gate_up=True, ropes=interleaved_ropes, partial_rotary=True
    ),
    "Glm4ForCausalLM": Family(
        biases=_input_biases,
        norms="both",
        fused_gate_up=True,
        renamed=(
            ("post_attention_layernorm", "post_self_attn_layernorm"),
            ("pre_feedforward_layernorm", "post_attention_layernorm"),
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
        ),
        ropes=interleaved_ropes,
        partial_rotary=True,
    ),
    "Glm4MoeForCausalLM": Family(
        biases=_input_biases,
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        partial_rotary=True,
        read=partial(_partly_turning, share=0.5),
        moe=deepseek_v3_experts,
        mtp=DEEPSEEK,
    ),
    "SmolLM3ForCausalLM": Family(
        tied_by_default=True,
        windows=_windows_without_rope,
        windows_if="use_sliding_window",
        ropes=ropes_but_for_some,
    ),
    "Qwen2ForCausalLM": Family(
        biases=lambda _: (True, False), windows=_upper_windows, windows_if="use_sliding_window"
    ),
    "MiMoForCausalLM": Family(
        biases=lambda _: (True, False),
        windows=_upper_windows,
        windows_if="use_sliding_window",
        mtp=MIMO,
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm="head", windows=_upper_windows, windows_if="use_sliding_window"
    ),
    "Gemma3ForCausalLM": Family(
        qk_norm="head",
        norms="both",
        norm_offset=1.0,
        activation_key="hidden_activation",
        tied_by_default=True,
        windows=partial(_alternating_windows, usual=6),
        scales=_gemma_scales,
        caps=tuple(CAPS),
    ),
    "Gemma4ForCausalLM": Family(
        qk_norm="head",
        norms="both",
        activation_key="hidden_activation",
        windows=partial(_alternating_windows, usual=6),
        partial_rotary=True,
        scales=lambda config: {
            "embed_scale": float(config["hidden_size"]) ** 0.5,
            "attention_scale": 1.0,
        },
        caps=("final_logit_softcapping",),
        read=gemma4_config,
        moe=gemma4_experts,
        kinds=gemma4_layers,
        extras=_gemma4_extras,
    ),
    "Gemma2ForCausalLM": Family(
        norms="both",
        norm_offset=1.0,
        activation_key="hidden_activation",
        tied_by_default=True,
        windows=partial(_alternating_windows, usual=2),
        scales=_gemma_scales,
        caps=tuple(CAPS),
        read=_gemma2,
    ),
    "VaultGemmaForCausalLM": Family(
        norm_offset=1.0,
        activation_key="hidden_activation",
        tied_by_default=True,
        windows=partial(_alternating_windows, usual=2),
        scales=_gemma_scales,
        caps=tuple(CAPS),
        read=_gemma2,
        renamed=((".post_attention_layernorm.", ".pre_feedforward_layernorm."),),
    ),
    "GemmaForCausalLM": Family(
        norm_offset=1.0,
        activations=_GEMMA_ACTIVATIONS,
        tied_by_default=True,
        scales=lambda config: {"embed_scale": float(config["hidden_size"]) ** 0.5},
    ),
    "Phi3ForCausalLM": Family(
        fused_qkv=True, fused_gate_up=True, windows=_uniform_window, partial_rotary=True
    ),
    "Olmo2ForCausalLM": Family(qk_norm="full", norms="post"),
    "Olmo3ForCausalLM": Family(
        qk_norm="full",
        norms="post",
        windows=partial(_alternating_windows, usual=4),
        ropes=ropes_unscaled_in_windows,
    ),
    "Exaone4ForCausalLM": Family(
        qk_norm="head",
        norms="post",
        windows=partial(_alternating_windows, usual=4),
        ropes=ropes_in_windows_alone,
    ),
    "GraniteForCausalLM": Family(scales=_granite_scales),
    "Qwen3MoeForCausalLM": Family(
        qk_norm="head", windows=_uniform_window, windows_if="use_sliding_window", moe=qwen_experts
    ),
    "MixtralForCausalLM": Family(windows=_uniform_window, moe=mixtral_experts),
    "Qwen2MoeForCausalLM": Family(
        biases=lambda config: (bool(config.get("qkv_bias", True)), False),
        windows=_upper_windows,
        windows_if="use_sliding_window",
        moe=qwen2_experts,
    ),
    "OlmoeForCausalLM": Family(qk_norm="full", moe=olmoe_experts),
    "DeepseekV2ForCausalLM": replace(_LATENT, moe=deepseek_v2_experts),
    "DeepseekV3ForCausalLM": replace(_LATENT, moe=deepseek_v3_experts, mtp=DEEPSEEK),
    "Glm4MoeLiteForCausalLM": replace(_LATENT, moe=glm4_moe_lite_experts, mtp=DEEPSEEK),
    "GraniteMoeForCausalLM": Family(scales=_granite_scales, moe=granite_experts),
    "ApertusForCausalLM": Family(
        qk_norm="head",
        activations={"xielu": "xielu"},
        renamed=(
            (".input_layernorm.", ".attention_layernorm."),
            (".post_attention_layernorm.", ".feedforward_layernorm."),
        ),
    ),
    "ArceeForCausalLM": Family(activations={"relu2": "relu2"}),
    "NanoChatForCausalLM": Family(
        qk_norm="head",
        bare_norms=True,
        embed_norm=True,
        activations={"relu2": "relu2"},
        ropes=ropes_backwards,
        caps=("final_logit_softcapping",),
        read=lambda config: {"final_logit_softcapping": 15.0, **config},
        renamed=((".mlp.up_proj.", ".mlp.fc1."), (".mlp.down_proj.", ".mlp.fc2.")),
    ),
    "GptOssForCausalLM": Family(
        biases=partial(_every_bias, usual=True),
        attention_sinks=True,
        activations={"silu": "clamped_swiglu"},
        windows=partial(_alternating_windows, usual=2),
        moe=gpt_oss_experts,
    ),
    "GraniteMoeSharedForCausalLM": Family(scales=_granite_scales, moe=granite_experts),
    "Qwen3_5ForCausalLM": Family(
        qk_norm="head",
        norm_offset=1.0,
        gated_attention=True,
        state=partial(delta_net, joint=False),
        partial_rotary=True,
        read=_quarter_turning,
        unused=("mtp.",),
        mtp=QWEN,
    ),
    "Qwen3NextForCausalLM": Family(
        qk_norm="head",
        norm_offset=1.0,
        gated_attention=True,
        state=partial(delta_net, joint=True),
        partial_rotary=True,
        read=_quarter_turning,
        moe=qwen2_experts,
        unused=("mtp.",),
        mtp=QWEN,
    ),
    "Lfm2ForCausalLM": Family(
        biases=lambda _: (False, False),
        qk_norm="head",
        state=short_conv,
        read=_lfm2,
        renamed=(
            (".input_layernorm.", ".operator_norm."),
            (".post_attention_layernorm.", ".ffn_norm."),
            ("model.norm.", "model.embedding_norm."),
            (".self_attn.o_proj.", ".self_attn.out_proj."),
            (".self_attn.q_norm.", ".self_attn.q_layernorm."),
            (".self_attn.k_norm.", ".self_attn.k_layernorm."),
            (".mlp.gate_proj.", ".feed_forward.w1."),
            (".mlp.up_proj.", ".feed_forward.w3."),
            (".mlp.down_proj.", ".feed_forward.w2."),
        ),
    ),
}


def _text_part(of: str, read: Callable[[Config], Config] = text_config) -> Family:
    return replace(ARCHITECTURES[of], read=read, is_text_part=True)


ARCHITECTURES |= {
    "Gemma3ForConditionalGeneration": _text_part("Gemma3ForCausalLM", gemma3_text_config),
    "Gemma4ForConditionalGeneration": _text_part("Gemma4ForCausalLM", gemma4_text_config),
    "Gemma4UnifiedForCausalLM": ARCHITECTURES["Gemma4ForCausalLM"],
    "Gemma4UnifiedForConditionalGeneration": _text_part("Gemma4ForCausalLM", gemma4_text_config),
    "Mistral3ForConditionalGeneration": _text_part("MistralForCausalLM"),
    "Qwen2VLForConditionalGeneration": _text_part("Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": _text_part("Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": _text_part("Qwen3ForCausalLM"),
    "Qwen3_5ForConditionalGeneration": _text_part(
        "Qwen3_5ForCausalLM", lambda config: _quarter_turning(text_config(config))
    ),
}
