"""`ModelSpec`: a Hugging Face config.json read into the switches that the one decoder knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, check_end_ids, check_values, shown
from nano_inference.models.spec.experts import (
    MoeSpec,
    deepseek_v2_experts,
    deepseek_v3_experts,
    ernie_experts,
    gemma4_experts,
    gpt_oss_experts,
    granite_experts,
    mixtral_experts,
    olmoe_experts,
    qwen2_experts,
    qwen_experts,
)
from nano_inference.models.spec.gemma4 import gemma4_config, gemma4_text_config
from nano_inference.models.spec.latents import (
    LatentSpec,
    latent_ropes,
    latent_scale,
    read_latent,
)
from nano_inference.models.spec.layers import LayerSpec, gemma4_layers
from nano_inference.models.spec.quantisation import Quantisation, read_quantisation
from nano_inference.models.spec.refused import refusal
from nano_inference.models.spec.rope import (
    ReadRopes,
    RopeSpec,
    interleaved_ropes,
    ropes_backwards,
    ropes_but_for_some,
    ropes_by_window,
    ropes_in_windows_alone,
    ropes_unscaled_in_windows,
    turning_layers,
)
from nano_inference.models.spec.states import StateSpec, delta_net, short_conv
from nano_inference.models.spec.text_part import gemma3_text_config, other_names, text_config
from nano_inference.sampling.logit_scale import LogitScale

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "xielu", "relu2"]
NormPlacement = Literal["pre", "post", "both"]
QkNorm = Literal["head", "full"]

CONVERTED = "nano_inference_converted_from"  # what config.json has of a converted .gguf file

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


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
        quantisation: how the checkpoint says that its weights are stored; None: as they are.
        quantized_source: the checkpoint was made from a quantised file, so its dtype says nothing.
        windows: one entry a layer: how many tokens, itself included, a token attends to; 0: all
            before it.
        ropes: one entry a layer: its rotary embedding.
        qkv_bias, o_bias: the attention's projections have biases.
        qk_norm: queries and keys are normalised before they are rotated: each head for itself
            (`"head"`), or all heads of a token together (`"full"`).
        norms: where a layer has its norms: before attention and MLP (`"pre"`), after them
            (`"post"`), or `"both"`.
        norm_offset: added to the weights of norms; such weights are kept in float32.
        activation: of the MLP's gate, `"silu"`, `"gelu_tanh"` or `"clamped_swiglu"`; or of an MLP
            without a gate, `"xielu"` or `"relu2"`.
        bare_norms: norms have no weights.
        embed_norm: embeddings are normalised, by the last norm.
        attention_scale: multiplies queries times keys.
        attention_cap, logits_cap: such a score, or a logit, s becomes cap * tanh(s / cap); 0: it
            stays.
        gated_attention: what attention gives is multiplied by the sigmoid of a projection.
        attention_sinks: each query head has a score that belongs to no key, in the softmax's sum.
        embed_scale, residual_scale, logits_divisor: embeddings are multiplied, what a block adds to
            the residual stream is multiplied, logits are divided by it.
        fused_qkv, fused_gate_up: the checkpoint stores q, k, v in one tensor, gate and up in one.
        moe: its layers of experts; None: it has none.
        state: its layers that carry a state instead of attending to keys; None: it has none.
        renamed: parts of names in the checkpoint: ours, and what stands there instead.
        is_text_part: the checkpoint also holds what reads pictures or sounds; it is passed over.
        latent: its attention is over latents, and `num_kv_heads` and `head_dim` are those of these;
            None: over keys and values.
        unused: what names of checkpoint tensors begin with that are not used.
        kinds: one entry a layer, where layers are of several kinds, and `num_kv_heads`, `head_dim`
            and `intermediate_size` are those of most; none: all are as these say (`layer`).
        value_norm: values are normalised by head too, without weights.
        layer_inputs: numbers of an input of its own that each layer gets, made of the token and of
            its embedding; 0: there are none.
        layer_vocab: tokens that such inputs are known of.
        layer_scales: what leaves a layer is multiplied by a number of the layer.
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
    ropes: tuple[RopeSpec, ...]
    windows: tuple[int, ...]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    attention_scale: float
    gated_attention: bool = False
    attention_sinks: bool = False
    quantisation: Quantisation | None = None
    quantized_source: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    norms: NormPlacement = "pre"
    norm_offset: float = 0.0
    activation: Activation = "silu"
    bare_norms: bool = False
    embed_norm: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    attention_cap: float = 0.0
    logits_cap: float = 0.0
    fused_qkv: bool = False
    fused_gate_up: bool = False
    moe: MoeSpec | None = None
    state: StateSpec | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    is_text_part: bool = False
    latent: LatentSpec | None = None
    unused: tuple[str, ...] = ()
    kinds: tuple[LayerSpec, ...] = ()
    value_norm: bool = False
    layer_inputs: int = 0
    layer_vocab: int = 0
    layer_scales: bool = False

    def layer(self, layer: int) -> LayerSpec:
        """What a layer has for itself."""
        if self.kinds:
            return self.kinds[layer]
        heads = self.num_kv_heads, self.head_dim
        return LayerSpec(*heads, False, layer, self.intermediate_size)

    @property
    def widest_head(self) -> int:
        """Of all layers."""
        return max((kind.head_dim for kind in self.kinds), default=self.head_dim)

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate."""
        return self.activation not in ("xielu", "relu2")

    @property
    def logit_scale(self) -> LogitScale:
        """From the head's products to logits."""
        return LogitScale(self.logits_divisor, self.logits_cap)

    @property
    def value_dim(self) -> int:
        """Numbers of a head's output."""
        return self.head_dim if self.latent is None else self.latent.sizes.value

    @property
    def kv_tensors(self) -> int:
        """Keys and values; of latents, which are both, one."""
        return 2 if self.latent is None else 1


def _every_bias(config: Config, usual: bool = False) -> tuple[bool, bool]:
    every = bool(config.get("attention_bias", usual))
    return every, every


def _input_biases(config: Config) -> tuple[bool, bool]:
    return bool(config.get("attention_bias", False)), False


def _ernie_biases(config: Config) -> tuple[bool, bool]:
    if config.get("use_bias"):
        raise ModelLoadError("config.json has use_bias=True; this decoder's MLPs have no biases.")
    return False, False


@dataclass(frozen=True, slots=True)
class _Family:
    """What the name of an architecture says, and its config.json does not."""

    # config -> whether q, k and v have biases, and whether the output projection has one
    biases: Callable[[Config], tuple[bool, bool]] = _every_bias
    qk_norm: QkNorm | None = None
    qk_norm_if: str | None = None  # what says that there are such norms; None: there always are
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
    caps: tuple[str, ...] = ()  # of `_CAPS`, which config.json may name
    # (config, layers); None: the family has none
    windows: Callable[[Config, int], tuple[int, ...]] | None = None
    windows_if: str | None = None  # what says that there are windows; None: there are
    ropes: ReadRopes = ropes_by_window
    partial_rotary: bool = False  # partial_rotary_factor may say that some numbers do not turn
    scales: Callable[[Config], dict[str, float]] = lambda _: {}
    moe: Callable[[Config, int], MoeSpec | None] = lambda _, __: None  # (config, layers)
    state: Callable[[Config, int], StateSpec | None] = lambda _, __: None  # (config, layers)
    gated_attention: bool = False
    unused: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    is_text_part: bool = False
    read: Callable[[Config], Config] = lambda config: config  # its keys by the names of others
    latent: Callable[[Config], LatentSpec | None] = lambda _: None
    # (config, windows); layers are of several kinds
    kinds: Callable[[Config, tuple[int, ...]], tuple[LayerSpec, ...]] = lambda _, __: ()
    own: Callable[[Config], dict[str, Any]] = lambda _: {}  # what no other family has


def spec_from_config(
    config: Config, generation_config: Config | None = None, folder: Path | None = None
) -> ModelSpec:
    """Read config.json (and generation_config.json) of a model, and what files beside it in
    `folder` say of a quantisation.

    Raises `ModelLoadError` for what the decoder lacks, for a quantisation that is not known, and
    for a value that no model has.
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
    architecture: str, family: _Family, config: Config, generation_config: Config
) -> ModelSpec:
    config = family.read(config)
    check_values(config)  # again: under the names that they have now
    for name in _UNSUPPORTED:
        if config.get(name) and name not in family.caps:
            raise ModelLoadError(
                f"config.json has {name}={config[name]!r}; this decoder has no {name}."
            )
    if missing := [name for name in _REQUIRED if config.get(name) is None]:
        raise KeyError(missing[0])
    num_heads, num_layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    latent = family.latent(config)
    num_kv_heads = 1 if latent else int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
    head_dim = latent.sizes.key if latent else head_dim
    _check_heads(num_heads, num_kv_heads, head_dim)
    max_position = int(config["max_position_embeddings"])
    qkv_bias, o_bias = family.biases(config)
    windows = (
        family.windows(config, num_layers)
        if family.windows is not None and _told(config, family.windows_if)
        else (0,) * num_layers
    )
    ropes = family.ropes(config, max_position, windows)
    kinds = family.kinds(config, windows)
    for kind in kinds:
        _check_heads(num_heads, kind.num_kv_heads, kind.head_dim)
    for layer, rope in enumerate(ropes):
        _check_rope(rope, kinds[layer].head_dim if kinds else head_dim, architecture, family)
    scales: dict[str, Any] = {"attention_scale": head_dim**-0.5} | family.scales(config)
    scales |= {_CAPS[name]: float(config.get(name) or 0) for name in family.caps}
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
        qk_norm=family.qk_norm if _told(config, family.qk_norm_if) else None,
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
        **family.own(config),
    )


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly."
        )
    if head_dim < 2 or head_dim % 2:
        raise ModelLoadError(
            f"heads are {head_dim} wide; rotary embedding turns pairs, so head_dim must be even."
        )


def _check_rope(rope: RopeSpec, head_dim: int, architecture: str, family: _Family) -> None:
    """Of heads that are so wide."""
    if rope.share != 1 and not family.partial_rotary:
        raise ModelLoadError(
            f"partial_rotary_factor other than 1 is not supported of {architecture}."
        )
    turning = rope.turning(head_dim)
    if turning < 2 or turning % 2 or turning > head_dim:
        raise ModelLoadError(
            f"partial_rotary_factor={rope.share:g} of heads {head_dim} wide turns {turning} "
            "numbers; it must be an even number of them."
        )
    if rope.factors and len(rope.factors) != turning // 2:
        raise ModelLoadError(
            f"rope scaling has {len(rope.factors)} factors; heads {head_dim} wide need "
            f"{turning // 2}."
        )


def _told(config: Config, switch: str | None) -> bool:
    return switch is None or bool(config.get(switch))


def _uniform_window(config: Config, num_layers: int) -> tuple[int, ...]:
    """The same `sliding_window` in every layer, unless `layer_types` says otherwise."""
    return _windows(config, ["sliding_attention"] * num_layers)


def _upper_windows(config: Config, num_layers: int) -> tuple[int, ...]:
    """Qwen: in the layers from `max_window_layers` on."""
    first = int(config.get("max_window_layers", num_layers))
    return _windows(
        config, ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    )


def _alternating_windows(
    config: Config, num_layers: int, usual: int, nth: int = 0
) -> tuple[int, ...]:
    """One layer in so many sees everything: the last of them, or the `nth`."""
    told = config.get("sliding_window_pattern")  # as transformers: not what it writes with "_"
    if told == 0 and not config.get("layer_types"):
        raise ModelLoadError(
            "config.json has sliding_window_pattern=0; without layer_types it must be above 0."
        )
    period = told if isinstance(told, int) and told else usual
    return _windows(
        config,
        [
            "full_attention" if (i + 1) % period == nth else "sliding_attention"
            for i in range(num_layers)
        ],
    )


def _windows_without_rope(config: Config, num_layers: int) -> tuple[int, ...]:
    """SmolLM3: in the layers that do not turn, unless `layer_types` says otherwise."""
    turning = turning_layers(config, num_layers)
    return _windows(config, ["full_attention" if each else "sliding_attention" for each in turning])


def _windows(config: Config, default_types: list[str]) -> tuple[int, ...]:
    types = config.get("layer_types") or default_types
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown or len(types) != len(default_types):
        raise ModelLoadError(
            f"config.json has layer_types {shown(types)}; {len(default_types)} entries are needed, "
            "each 'full_attention' or "
            "'sliding_attention'."
        )
    window = int(config.get("sliding_window") or 0)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


_CAPS = {"attn_logit_softcapping": "attention_cap", "final_logit_softcapping": "logits_cap"}


def _gemma_scales(config: Config) -> dict[str, float]:
    return {
        "embed_scale": float(config["hidden_size"]) ** 0.5,
        "attention_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
    }


def _gemma2(config: Config) -> Config:
    """The caps of Gemma 2, where config.json does not name them."""
    return {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}


def _granite_scales(config: Config) -> dict[str, float]:
    return {
        "embed_scale": float(config.get("embedding_multiplier", 1.0)),
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "logits_divisor": float(config.get("logits_scaling", 1.0)),
    }


def _gemma4_own(config: Config) -> dict[str, Any]:
    """Raises `ModelLoadError` where tokens have no input for the layers."""
    width, known = int(config["hidden_size_per_layer_input"]), config["vocab_size_per_layer_input"]
    if width and known < config["vocab_size"]:
        raise ModelLoadError(
            f"config.json has vocab_size_per_layer_input={known}; the vocabulary has "
            f"{config['vocab_size']} tokens."
        )
    inputs = {"layer_inputs": width, "layer_vocab": known} if width else {}
    return {"value_norm": True, "layer_scales": True, **inputs}


# Gemma's first release calls it so, and means the approximation by tanh.
_GEMMA_ACTIVATIONS: dict[str, Activation] = {**_ACTIVATIONS, "gelu": "gelu_tanh"}


def _lfm2(config: Config) -> Config:
    """LFM2 names its epsilon and its MLP's width otherwise, and makes the latter smaller."""
    inner = int(config["block_ff_dim"] if "block_ff_dim" in config else config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim", True):
        unit = int(config.get("block_multiple_of", 256))
        inner = int(2 * inner / 3)
        factor = config.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            inner = -(-int(factor * inner) // unit) * unit
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    own = {"rms_norm_eps": config["norm_eps"], "intermediate_size": inner}
    return {**config, **own, "tie_word_embeddings": tied}


def _partly_turning(config: Config, share: float) -> Config:
    """The part of a head that turns where config.json does not say it."""
    return {"partial_rotary_factor": share, **config}


_quarter_turning = partial(_partly_turning, share=0.25)  # Qwen3-Next and Qwen3.5


_LATENT = _Family(latent=read_latent, ropes=latent_ropes, partial_rotary=True, scales=latent_scale)

ARCHITECTURES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(windows=_uniform_window),
    "MinistralForCausalLM": _Family(windows=_uniform_window),
    "CwmForCausalLM": _Family(windows=partial(_alternating_windows, usual=4, nth=1)),
    "SeedOssForCausalLM": _Family(
        biases=lambda config: (
            bool(config.get("attention_bias", True)),
            bool(config.get("attention_out_bias", False)),
        )
    ),
    "Ministral3ForCausalLM": _Family(windows=_uniform_window),
    "HeliumForCausalLM": _Family(biases=_input_biases, ropes=interleaved_ropes),
    "Ernie4_5ForCausalLM": _Family(
        biases=_ernie_biases, tied_by_default=True, ropes=interleaved_ropes
    ),
    "Ernie4_5_MoeForCausalLM": _Family(
        biases=_ernie_biases, tied_by_default=True, ropes=interleaved_ropes, moe=ernie_experts
    ),
    "Dots1ForCausalLM": _Family(qk_norm="head", windows=_uniform_window, moe=deepseek_v3_experts),
    "GlmForCausalLM": _Family(
        biases=_input_biases, fused_gate_up=True, ropes=interleaved_ropes, partial_rotary=True
    ),
    "Glm4ForCausalLM": _Family(
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
    "Glm4MoeForCausalLM": _Family(
        biases=_input_biases,
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        partial_rotary=True,
        read=partial(_partly_turning, share=0.5),
        moe=deepseek_v3_experts,
    ),
    "SmolLM3ForCausalLM": _Family(
        tied_by_default=True,
        windows=_windows_without_rope,
        windows_if="use_sliding_window",
        ropes=ropes_but_for_some,
    ),
    "Qwen2ForCausalLM": _Family(
        biases=lambda _: (True, False), windows=_upper_windows, windows_if="use_sliding_window"
    ),
    "Qwen3ForCausalLM": _Family(
        qk_norm="head", windows=_upper_windows, windows_if="use_sliding_window"
    ),
    "Gemma3ForCausalLM": _Family(
        qk_norm="head",
        norms="both",
        norm_offset=1.0,
        activation_key="hidden_activation",
        tied_by_default=True,
        windows=partial(_alternating_windows, usual=6),
        scales=_gemma_scales,
        caps=tuple(_CAPS),
    ),
    "Gemma4ForCausalLM": _Family(
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
        own=_gemma4_own,
    ),
    "Gemma2ForCausalLM": _Family(
        norms="both",
        norm_offset=1.0,
        activation_key="hidden_activation",
        tied_by_default=True,
        windows=partial(_alternating_windows, usual=2),
        scales=_gemma_scales,
        caps=tuple(_CAPS),
        read=_gemma2,
    ),
    "VaultGemmaForCausalLM": _Family(
        norm_offset=1.0,
        activation_key="hidden_activation",
        tied_by_default=True,
        windows=partial(_alternating_windows, usual=2),
        scales=_gemma_scales,
        caps=tuple(_CAPS),
        read=_gemma2,
        renamed=((".post_attention_layernorm.", ".pre_feedforward_layernorm."),),
    ),
    "GemmaForCausalLM": _Family(
        norm_offset=1.0,
        activations=_GEMMA_ACTIVATIONS,
        tied_by_default=True,
        scales=lambda config: {"embed_scale": float(config["hidden_size"]) ** 0.5},
    ),
    "Phi3ForCausalLM": _Family(
        fused_qkv=True, fused_gate_up=True, windows=_uniform_window, partial_rotary=True
    ),
    "Olmo2ForCausalLM": _Family(qk_norm="full", norms="post"),
    "Olmo3ForCausalLM": _Family(
        qk_norm="full",
        norms="post",
        windows=partial(_alternating_windows, usual=4),
        ropes=ropes_unscaled_in_windows,
    ),
    "Exaone4ForCausalLM": _Family(
        qk_norm="head",
        norms="post",
        windows=partial(_alternating_windows, usual=4),
        ropes=ropes_in_windows_alone,
    ),
    "GraniteForCausalLM": _Family(scales=_granite_scales),
    "Qwen3MoeForCausalLM": _Family(
        qk_norm="head", windows=_uniform_window, windows_if="use_sliding_window", moe=qwen_experts
    ),
    "MixtralForCausalLM": _Family(windows=_uniform_window, moe=mixtral_experts),
    "Qwen2MoeForCausalLM": _Family(
        biases=lambda config: (bool(config.get("qkv_bias", True)), False),
        windows=_upper_windows,
        windows_if="use_sliding_window",
        moe=qwen2_experts,
    ),
    "OlmoeForCausalLM": _Family(qk_norm="full", moe=olmoe_experts),
    "DeepseekV2ForCausalLM": replace(_LATENT, moe=deepseek_v2_experts),
    "DeepseekV3ForCausalLM": replace(_LATENT, moe=deepseek_v3_experts),
    "GraniteMoeForCausalLM": _Family(scales=_granite_scales, moe=granite_experts),
    "ApertusForCausalLM": _Family(
        qk_norm="head",
        activations={"xielu": "xielu"},
        renamed=(
            (".input_layernorm.", ".attention_layernorm."),
            (".post_attention_layernorm.", ".feedforward_layernorm."),
        ),
    ),
    "ArceeForCausalLM": _Family(activations={"relu2": "relu2"}),
    "NanoChatForCausalLM": _Family(
        qk_norm="head",
        bare_norms=True,
        embed_norm=True,
        activations={"relu2": "relu2"},
        ropes=ropes_backwards,
        caps=("final_logit_softcapping",),
        read=lambda config: {"final_logit_softcapping": 15.0, **config},
        renamed=((".mlp.up_proj.", ".mlp.fc1."), (".mlp.down_proj.", ".mlp.fc2.")),
    ),
    "GptOssForCausalLM": _Family(
        biases=partial(_every_bias, usual=True),
        attention_sinks=True,
        activations={"silu": "clamped_swiglu"},
        windows=partial(_alternating_windows, usual=2),
        moe=gpt_oss_experts,
    ),
    "GraniteMoeSharedForCausalLM": _Family(scales=_granite_scales, moe=granite_experts),
    "Qwen3_5ForCausalLM": _Family(
        qk_norm="head",
        norm_offset=1.0,
        gated_attention=True,
        state=partial(delta_net, joint=False),
        partial_rotary=True,
        read=_quarter_turning,
        unused=("mtp.",),
    ),
    "Qwen3NextForCausalLM": _Family(
        qk_norm="head",
        norm_offset=1.0,
        gated_attention=True,
        state=partial(delta_net, joint=True),
        partial_rotary=True,
        read=_quarter_turning,
        moe=qwen2_experts,
        unused=("mtp.",),
    ),
    "Lfm2ForCausalLM": _Family(
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


def _text_part(of: str, read: Callable[[Config], Config] = text_config) -> _Family:
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

_REQUIRED = (
    *("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps"),
)
_UNSUPPORTED = (
    "mlp_bias",
    "clip_qkv",
    *_CAPS,
    "use_bidirectional_attention",
)


def _activation(config: Config, family: _Family) -> Activation:
    key, known = family.activation_key, family.activations
    name = config.get(key) or "silu"
    if name not in known:
        raise ModelLoadError(
            f"config.json has {key}={name!r}; this decoder knows {', '.join(known)}."
        )
    return known[name]


def _unused(config: Config, num_layers: int) -> tuple[str, ...]:
    """What predicts further tokens: layers behind the last one, or Ernie's."""
    count = int(config.get("num_nextn_predict_layers") or 0)
    behind = tuple(f"model.layers.{num_layers + layer}." for layer in range(count))
    return (*behind, "model.mtp_") if count else ()


def _unread(kinds: tuple[LayerSpec, ...], family: _Family) -> tuple[str, ...]:
    """What makes keys and values in layers that read another's."""
    names = [
        f"model.layers.{layer}.self_attn.{part}."
        for layer, kind in enumerate(kinds)
        if kind.keys_of != layer
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    others = [other for name in names for other in other_names(name)] if family.is_text_part else []
    return (*names, *others)


def _eos_ids(config: Config, generation_config: Config) -> tuple[int, ...]:
    found = generation_config.get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
