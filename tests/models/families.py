"""The families that are tested with strong weights: a tiny model of each, and its spec without each
of its features.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nano_inference.config import Backend
from nano_inference.models.spec.model import ModelSpec

Change = Callable[[ModelSpec], ModelSpec]


@dataclass(frozen=True)
class Case:
    """A tiny model, and its spec without each of its features."""

    class_name: str
    config: dict[str, Any] = field(default_factory=dict[str, Any])  # `sizes` of `strong_model`
    features: dict[str, Change] = field(default_factory=dict[str, Change])
    backend: Backend = "cpu"  # "reference" if only that backend supports the model


def spec_with(**fields: Any) -> Change:
    """Return a change that sets fields of the spec."""
    return lambda spec: replace(spec, **fields)


def without_windows(spec: ModelSpec) -> ModelSpec:
    return replace(spec, windows=(0,) * spec.num_layers)


def with_ropes(**fields: Any) -> Change:
    """Change the rope of every layer."""
    return lambda spec: replace(spec, ropes=tuple(replace(rope, **fields) for rope in spec.ropes))


def one_rope(spec: ModelSpec) -> ModelSpec:
    """Give windowed layers the rope of the full layers."""
    full = next(rope for rope, window in zip(spec.ropes, spec.windows, strict=True) if not window)
    return replace(spec, ropes=(full,) * spec.num_layers)


def moe_with(**fields: Any) -> Change:
    """Return a change that sets fields of the expert layers."""

    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.moe is not None
        return replace(spec, moe=replace(spec.moe, **fields))

    return change


def routing_with(**fields: Any) -> Change:
    """Return a change that sets fields of the expert routing."""

    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.moe is not None
        return moe_with(routing=spec.moe.routing._replace(**fields))(spec)

    return change


def shared_with(**fields: Any) -> Change:
    """Return a change that sets fields of the shared expert."""

    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.moe is not None
        assert spec.moe.shared is not None
        return moe_with(shared=replace(spec.moe.shared, **fields))(spec)

    return change


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
GLM4_MOE: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
GRANITE: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.7,
}
GRANITE_FEATURES: dict[str, Change] = {
    "embedding_multiplier": spec_with(embed_scale=1.0),
    "attention_multiplier": spec_with(attention_scale=0.25),
    "residual_multiplier": spec_with(residual_scale=1.0),
    "logits_scaling": spec_with(logits_divisor=1.0),
    "weights of experts": routing_with(renormalized=False),
}


LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 48,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
    },
}
LATENT_FEATURES: dict[str, Change] = {
    "yarn": with_ropes(kind="default", attention_factor=1.0),
    "pairs of neighbours": with_ropes(interleaved=False),
    "yarn's scale": spec_with(attention_scale=40**-0.5),
    "shared experts": moe_with(shared=None),
    "scale of experts": routing_with(scale=1.0),
    "groups": routing_with(groups=1, groups_kept=1),
}


def other_keys(spec: ModelSpec) -> ModelSpec:
    """Make layers with shared keys read those of the first layer with the same head size."""
    firsts = [
        next(i for i, each in enumerate(spec.kinds) if each[:3] == kind[:3]) for kind in spec.kinds
    ]
    kinds = tuple(
        kind if kind.keys_of == layer else kind._replace(keys_of=first)
        for layer, (kind, first) in enumerate(zip(spec.kinds, firsts, strict=True))
    )
    return replace(spec, kinds=kinds)


GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 17,
    "global_head_dim": 32,
    "final_logit_softcapping": 3.0,
}
GEMMA4_OF_TWO_HEADS: dict[str, Any] = GEMMA4 | {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
GEMMA4_WITH_INPUTS: dict[str, Any] = GEMMA4 | {
    "num_key_value_heads": 1,
    "num_hidden_layers": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
}
NO_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 300}
GEMMA4_FEATURES: dict[str, Change] = {
    "windows": without_windows,
    "rope of windows": one_rope,
    "pairs that turn": with_ropes(share=1.0),
    "pairs, not numbers": with_ropes(kind="default"),
    "norms of queries and keys": spec_with(qk_norm=None),
    "norm of values": spec_with(value_norm=False),
    "scale of layers": spec_with(layer_scales=False),
    "attention_scale": spec_with(attention_scale=0.25),
    "embed_scale": spec_with(embed_scale=1.0),
    "activation": spec_with(activation="silu"),
    "final_logit_softcapping": spec_with(logits_cap=0.0),
    "norms after": spec_with(norms="pre"),
}
GEMMA4_PICTURES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


PICTURES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_PICTURES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
}
QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": 290,
    "video_token_id": 291,
    "vision_start_token_id": 292,
    "vision_end_token_id": 293,
}
MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 3, 3],
}

CASES = {
    "gemma3 with pictures": Case(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                "num_hidden_layers": 7,
                "sliding_window": 17,
                "query_pre_attn_scalar": 40,
            },
            "vision_config": PICTURES,
            "mm_tokens_per_image": 4,
            "image_token_index": 290,
            "boi_token_index": 291,
            "eoi_token_index": 292,
        },
        {"windows": without_windows, "rope of windows": one_rope},
    ),
    "mistral3 with pictures": Case(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral", "sliding_window": 16},
            "vision_config": PICTURES | {"model_type": "pixtral"},
            "image_token_index": 290,
        },
        {"windows": without_windows},
    ),
    "qwen2.5-vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {"rope_parameters": MROPE},
            "vision_config": QWEN_PICTURES | {"fullatt_block_indexes": [0]},
            **QWEN_TOKENS,
        },
        {"biases": spec_with(qkv_bias=False)},
    ),
    "qwen3-vl": Case(
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {"rope_parameters": MROPE | {"mrope_interleaved": True}},
            "vision_config": QWEN_PICTURES
            | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **QWEN_TOKENS,
        },
        {"norms of queries and keys": spec_with(qk_norm=None)},
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 7,
            "sliding_window": 17,
            "query_pre_attn_scalar": 40,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        {
            "windows": without_windows,
            "rope of windows": one_rope,
            "query_pre_attn_scalar": spec_with(attention_scale=0.25),
            "activation": spec_with(activation="silu"),
            "embed_scale": spec_with(embed_scale=1.0),
            "norms after": spec_with(norms="pre"),
        },
    ),
    "gemma4 with inputs of layers": Case(
        "Gemma4ForCausalLM",
        GEMMA4_WITH_INPUTS,
        GEMMA4_FEATURES
        | {"inputs of layers": spec_with(layer_inputs=0), "whose keys are read": other_keys},
    ),
    "gemma4": Case("Gemma4ForCausalLM", GEMMA4_OF_TWO_HEADS | NO_INPUTS, GEMMA4_FEATURES),
    "gemma4 with experts": Case(
        "Gemma4ForCausalLM",
        GEMMA4_OF_TWO_HEADS
        | NO_INPUTS
        | {
            "num_hidden_layers": 5,
            "layer_types": [*GEMMA4["layer_types"][:4], "full_attention"],
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
        GEMMA4_FEATURES
        | {
            "experts": spec_with(moe=None),
            "an MLP beside them": moe_with(beside=False),
            "norm of the router": moe_with(router_norm=None),
            "scale of the router": routing_with(logit_scale=1.0),
            "scales of experts": moe_with(scales=None),
        },
    ),
    "gemma4 with pictures": Case(
        "Gemma4ForConditionalGeneration",
        {
            "text_config": GEMMA4_WITH_INPUTS,
            "vision_config": GEMMA4_PICTURES,
            "audio_config": None,
        },
        {"windows": without_windows, "inputs of layers": spec_with(layer_inputs=0)},
    ),
    "gemma4-unified": Case(
        "Gemma4UnifiedForCausalLM", GEMMA4_OF_TWO_HEADS, {"windows": without_windows}
    ),
    "gemma4-unified with pictures": Case(
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": GEMMA4_OF_TWO_HEADS,
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 32,
                "mm_posemb_size": 16,
                "output_proj_dims": 64,
            },
            "audio_config": None,
        },
        {"windows": without_windows},
    ),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "query_pre_attn_scalar": 10,
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        {
            "windows": without_windows,
            "attn_logit_softcapping": spec_with(attention_cap=0.0),
            "final_logit_softcapping": spec_with(logits_cap=0.0),
            "query_pre_attn_scalar": spec_with(attention_scale=0.25),
            "norms after": spec_with(norms="pre"),
        },
    ),
    "gemma": Case(
        "GemmaForCausalLM",
        {"hidden_act": "gelu"},
        {
            "activation": spec_with(activation="silu"),
            "embed_scale": spec_with(embed_scale=1.0),
            "norm_offset": spec_with(norm_offset=0.0),
        },
    ),
    "olmo3": Case(
        "Olmo3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "windows": without_windows,
            "yarn": with_ropes(kind="default", attention_factor=1.0),
            "rope of windows": one_rope,
            "norms of queries and keys": spec_with(qk_norm=None),
            "norms after": spec_with(norms="pre"),
        },
    ),
    "exaone4": Case(
        "Exaone4ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 16},
        {
            "windows": without_windows,
            "layers that do not turn": with_ropes(kind="default"),
            "norms of queries and keys": spec_with(qk_norm=None),
        },
    ),
    "exaone4 without windows": Case(
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        {"rope": with_ropes(kind="none")},
    ),
    "ministral": Case(
        "MinistralForCausalLM",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"windows": without_windows},
    ),
    "cwm": Case(
        "CwmForCausalLM",
        {
            "num_hidden_layers": 5,
            "sliding_window": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "windows": without_windows,
            "llama3": with_ropes(kind="default", attention_factor=1.0),
        },
    ),
    "ministral3": Case(
        "Ministral3ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        {
            "scales of queries": with_ropes(query_beta=0.0),
            "yarn": with_ropes(kind="default"),
            "mscale": with_ropes(attention_factor=1.2),
        },
    ),
    "phi3": Case(
        "Phi3ForCausalLM",
        {
            "sliding_window": 33,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
        {"windows": without_windows, "three quarters that turn": with_ropes(share=1.0)},
    ),
    "helium": Case("HeliumForCausalLM", {}, {"neighbours": with_ropes(interleaved=False)}),
    "ernie4.5": Case("Ernie4_5ForCausalLM", {}, {"neighbours": with_ropes(interleaved=False)}),
    "glm": Case(
        "GlmForCausalLM",
        {"attention_bias": True},
        {
            "neighbours": with_ropes(interleaved=False),
            "a half that turns": with_ropes(share=1.0),
            "biases": spec_with(qkv_bias=False),
        },
    ),
    "glm4": Case(
        "Glm4ForCausalLM",
        {"attention_bias": False},
        {
            "neighbours": with_ropes(interleaved=False),
            "a half that turns": with_ropes(share=1.0),
            "norms after": spec_with(norms="pre"),
        },
    ),
    "glm4-moe": Case(
        "Glm4MoeForCausalLM",
        GLM4_MOE | {"use_qk_norm": True, "attention_bias": True},
        {
            "a half that turns": with_ropes(share=1.0),
            "biases": spec_with(qkv_bias=False),
            "norms of queries and keys": spec_with(qk_norm=None),
            "scores": routing_with(scores="softmax"),
            "correction bias": moe_with(bias=None),
            "groups": routing_with(groups=1, groups_kept=1),
            "scale of experts": routing_with(scale=1.0),
            "weights of experts": routing_with(renormalized=False),
            "shared experts": moe_with(shared=None),
        },
    ),
    "glm4-moe without norms": Case("Glm4MoeForCausalLM", GLM4_MOE),
    "seed-oss": Case(
        "SeedOssForCausalLM",
        {"attention_out_bias": True},
        {
            "biases of q, k, v": spec_with(qkv_bias=False),
            "bias of the output": spec_with(o_bias=False),
        },
    ),
    "smollm3": Case(
        "SmolLM3ForCausalLM",
        {"num_hidden_layers": 5},
        {"layers that do not turn": with_ropes(kind="default", theta=2e6)},
    ),
    "smollm3 with windows": Case(
        "SmolLM3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 16,
        },
        {"windows": without_windows},
    ),
    "qwen2-moe": Case(
        "Qwen2MoeForCausalLM",
        EXPERTS
        | {"num_experts": 6, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}
        | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        {
            "biases": spec_with(qkv_bias=False),
            "windows": without_windows,
            "shared expert": moe_with(shared=None),
            "its gate": shared_with(gate=None),
            "weights of experts": routing_with(renormalized=True),
        },
    ),
    "olmoe": Case(
        "OlmoeForCausalLM",
        EXPERTS | {"num_experts": 6},
        {
            "norms of queries and keys": spec_with(qk_norm=None),
            "weights of experts": routing_with(renormalized=True),
        },
    ),
    "gpt-oss": Case(
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "sliding_window": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
            # some gates and ups exceed 7
            "sizes": {"sinks": 2.0, "gate_up_proj_bias": 2.0, "gate_up_proj": 0.6, "bias": 1.0},
        },
        {
            "sinks": spec_with(attention_sinks=False),
            "windows": without_windows,
            "yarn": with_ropes(kind="default", attention_factor=1.0),
            "its band, not rounded": with_ropes(truncate=True),
            "its factor": with_ropes(attention_factor=1.0),
            "biases of q, k, v": spec_with(qkv_bias=False),
            "bias of the output": spec_with(o_bias=False),
            "biases of experts": moe_with(biases=False),
            "weights of experts": routing_with(renormalized=False),
            "activation": spec_with(activation="silu"),
        },
    ),
    "granite-moe": Case("GraniteMoeForCausalLM", GRANITE, GRANITE_FEATURES),
    "granite-moe-shared": Case(
        "GraniteMoeSharedForCausalLM",
        GRANITE | {"shared_intermediate_size": 48},
        GRANITE_FEATURES | {"shared expert": moe_with(shared=None)},
    ),
    "deepseek-v2": Case(
        "DeepseekV2ForCausalLM",
        LATENTS | {"topk_method": "group_limited_greedy"},
        LATENT_FEATURES | {"weights of experts": routing_with(renormalized=True)},
    ),
    "deepseek-v2-lite": Case(
        "DeepseekV2ForCausalLM",
        LATENTS | {"topk_method": "greedy", "q_lora_rank": None},
        {},
    ),
    "deepseek-v3": Case(
        "DeepseekV3ForCausalLM",
        LATENTS,
        LATENT_FEATURES
        | {
            "weights of experts": routing_with(renormalized=False),
            "scores": routing_with(scores="softmax"),
            "correction bias": moe_with(bias=None),
            "best two of a group": routing_with(group_best=1),
        },
    ),
    "glm4-moe-lite": Case(
        "Glm4MoeLiteForCausalLM",
        LATENTS | {"mlp_layer_types": ["sparse", "dense", "sparse"], "rms_norm_eps": 1e-3},
        LATENT_FEATURES
        | {
            "scores": routing_with(scores="softmax"),
            "correction bias": moe_with(bias=None),
            "scale of experts": routing_with(scale=1.0),
        },
    ),
    "ernie4.5-moe": Case(
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 2,
        },
        {
            "neighbours": with_ropes(interleaved=False),
            "correction bias": moe_with(bias=None),
            "shared experts": moe_with(shared=None),
            "weights of experts": routing_with(renormalized=False),
        },
    ),
    "dots1": Case(
        "Dots1ForCausalLM",
        EXPERTS
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
        | {"first_k_dense_replace": 1, "n_shared_experts": 2, "sliding_window": 20}
        | {"max_window_layers": 1, "num_experts_per_tok": 2},
        {
            "windows": without_windows,
            "norms of queries and keys": spec_with(qk_norm=None),
            "scores": routing_with(scores="softmax"),
            "correction bias": moe_with(bias=None),
            "groups": routing_with(groups=1, groups_kept=1),
            "scale of experts": routing_with(scale=1.0),
            "shared experts": moe_with(shared=None),
        },
    ),
    "vaultgemma": Case(
        "VaultGemmaForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        {
            "windows": without_windows,
            "attn_logit_softcapping": spec_with(attention_cap=0.0),
            "activation": spec_with(activation="silu"),
        },
    ),
    "arcee": Case(
        "ArceeForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {"yarn": with_ropes(kind="default", attention_factor=1.0)},
    ),
    "nanochat": Case(
        "NanoChatForCausalLM",
        {"final_logit_softcapping": 3.0},
        {
            "norms of queries and keys": spec_with(qk_norm=None),
            "norm of embeddings": spec_with(embed_norm=False),
            "rope backwards": with_ropes(factor=1.0),
            "final_logit_softcapping": spec_with(logits_cap=0.0),
        },
    ),
    "apertus": Case(
        "ApertusForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "norms of queries and keys": spec_with(qk_norm=None),
            "llama3": with_ropes(kind="default"),
        },
    ),
    "llama": Case(
        "LlamaForCausalLM",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "llama3": with_ropes(kind="default"),
            "biases of q, k, v": spec_with(qkv_bias=False),
            "bias of the output": spec_with(o_bias=False),
        },
    ),
    "mistral": Case("MistralForCausalLM", {"sliding_window": 16}, {"windows": without_windows}),
    "qwen2": Case(
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        {"windows": without_windows, "biases": spec_with(qkv_bias=False)},
    ),
    "mimo": Case("MiMoForCausalLM", {}, {"biases": spec_with(qkv_bias=False)}),
    "qwen3": Case("Qwen3ForCausalLM", {}, {"norms of queries and keys": spec_with(qk_norm=None)}),
    "olmo2": Case(
        "Olmo2ForCausalLM",
        {},
        {
            "norms of queries and keys": spec_with(qk_norm=None),
            "norms after": spec_with(norms="pre"),
        },
    ),
    "granite": Case(
        "GraniteForCausalLM",
        {name: value for name, value in GRANITE.items() if "experts" not in name},
        {
            "embedding_multiplier": spec_with(embed_scale=1.0),
            "attention_multiplier": spec_with(attention_scale=0.25),
            "residual_multiplier": spec_with(residual_scale=1.0),
            "logits_scaling": spec_with(logits_divisor=1.0),
        },
    ),
    "mixtral": Case(
        "MixtralForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 24},
        {"windows": without_windows, "weights of experts": routing_with(renormalized=False)},
    ),
    "qwen3-moe": Case(
        "Qwen3MoeForCausalLM",
        EXPERTS | {"num_experts": 6, "mlp_only_layers": [1], "norm_topk_prob": False},
        {
            "norms of queries and keys": spec_with(qk_norm=None),
            "weights of experts": routing_with(renormalized=True),
        },
    ),
    "qwen2-vl": Case(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {"rope_parameters": MROPE},
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "mlp_ratio": 2,
            },
            **QWEN_TOKENS,
        },
        {"biases": spec_with(qkv_bias=False)},
    ),
}

LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_bias": True,
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    # The first token's output of a head is (q . k) u over its own norm. If q . k is nearly 0,
    # float32 cannot resolve it. Larger inputs have keys similar to the queries. With this seed
    # transformers is at worst 5e-5 from its own float64 result.
    "sizes": {"A_log": 0.5, "in_proj_qkv": 0.6},
    "seed": 1,
}
NEXT: dict[str, Any] = DELTA | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "seed": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
}
DELTA_WITH_PICTURES: dict[str, Any] = {
    "text_config": {name: each for name, each in DELTA.items() if name not in ("sizes", "seed")},
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "sizes": DELTA["sizes"],
    "seed": DELTA["seed"],
}

# tests/models/test_states.py covers their features.
STATE_CASES = {
    "lfm2": Case("Lfm2ForCausalLM", LFM2),
    "qwen3.5": Case("Qwen3_5ForCausalLM", DELTA),
    "qwen3.5 with pictures": Case("Qwen3_5ForConditionalGeneration", DELTA_WITH_PICTURES),
    "qwen3-next": Case("Qwen3NextForCausalLM", NEXT),
}
