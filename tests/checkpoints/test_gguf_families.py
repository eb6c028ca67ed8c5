"""Round trip of every GGUF family: transformers' weights, written under the gguf
package's names.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from nano_inference.checkpoints.gguf.families import FAMILIES
from nano_inference.checkpoints.gguf.tokenizer import write_tokenizer
from nano_inference.errors import ModelLoadError
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints.hf_to_gguf import PLUS_ONE, TOKEN_IDS, hf_to_gguf, tensors_of
from tests.models.families import DELTA
from tests.models.strong import TOLERANCE, disagreement, strong_model
from tests.models.tiny_gguf import HEAD_DIM, described, gguf, tensors_in, write_gguf

LAYERS = 7  # one more than Gemma's period
COMMON: Mapping[str, Any] = {"rms_norm_eps": 2.0**-20, "num_hidden_layers": 3}
ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}


@dataclass(frozen=True)
class Case:
    """A family: GGUF's name, transformers' class, and config values in addition to `COMMON`."""

    architecture: str
    class_name: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GRANITE = {
    "attention_multiplier": 0.375,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.75,
    "logits_scaling": 4.0,
}
GRANITE_MOE = {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2}
LATENTS = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": {**YARN, "mscale": 0.75, "mscale_all_dim": 0.75},
}
CASES: Mapping[str, Case] = {
    "deepseek-v3": Case("deepseek2", "DeepseekV3ForCausalLM", LATENTS),
    "deepseek-v2": Case(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        {**LATENTS, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "deepseek-v2-lite": Case(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        {
            **LATENTS,
            "topk_method": "greedy",
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": ROPE,
        },
    ),
    "llama": Case("llama", "LlamaForCausalLM"),
    "llama with biases": Case("llama", "LlamaForCausalLM", {"attention_bias": True}),
    "llama 3": Case("llama", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama with yarn": Case("llama", "LlamaForCausalLM", {"rope_parameters": YARN}),
    "mixtral": Case(
        "llama",
        "MixtralForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": Case("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Case("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Case("qwen3moe", "Qwen3MoeForCausalLM", {**EXPERTS, "norm_topk_prob": True}),
    "gemma2": Case(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "query_pre_attn_scalar": HEAD_DIM,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Case(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": LAYERS,
            "sliding_window": 24,
            "query_pre_attn_scalar": HEAD_DIM,
            "rope_parameters": {
                "full_attention": ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": Case(
        "granite",
        "GraniteForCausalLM",
        GRANITE,
    ),
    "granitemoe": Case("granitemoe", "GraniteMoeForCausalLM", GRANITE_MOE),
    "granitemoe with a shared expert": Case(
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        {**GRANITE_MOE, "shared_intermediate_size": 48},
    ),
    "olmo2": Case("olmo2", "Olmo2ForCausalLM"),
    "olmo3": Case(
        "olmo2",
        "Olmo3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE},
        },
    ),
    "olmoe": Case("olmoe", "OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 2}),
    "qwen2moe": Case(
        "qwen2moe", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 48}
    ),
    "gemma": Case("gemma", "GemmaForCausalLM", {"rope_parameters": {**ROPE, "rope_theta": 1e4}}),
    "exaone4": Case(
        "exaone4", "Exaone4ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 24}
    ),
    "exaone4 without windows": Case(
        "exaone4",
        "Exaone4ForCausalLM",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": LLAMA3,
        },
    ),
    "seed_oss": Case("seed_oss", "SeedOssForCausalLM", {"attention_bias": True}),
    "seed_oss without biases": Case("seed_oss", "SeedOssForCausalLM", {"attention_bias": False}),
    "mistral3": Case("mistral3", "MistralForCausalLM", {"sliding_window": None}),
    "ministral 3": Case(
        "mistral3",
        "Ministral3ForCausalLM",
        {
            "sliding_window": None,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.125,
            },
        },
    ),
    "glm4": Case("glm4", "Glm4ForCausalLM", {"attention_bias": True}),
    "glm4 without biases": Case("glm4", "Glm4ForCausalLM", {"attention_bias": False}),
    "ernie4_5": Case("ernie4_5", "Ernie4_5ForCausalLM"),
    "gpt-oss": Case(
        "gpt-oss",
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "sliding_window": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "lfm2": Case(
        "lfm2",
        "Lfm2ForCausalLM",
        {
            "norm_eps": 2.0**-20,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "qwen35": Case("qwen35", "Qwen3_5ForCausalLM", DELTA),
    "qwen35 with 4 value heads per key head": Case(
        "qwen35", "Qwen3_5ForCausalLM", {**DELTA, "linear_num_value_heads": 8, "seed": 3}
    ),
    "qwen35 with a value head per key head": Case(
        "qwen35", "Qwen3_5ForCausalLM", {**DELTA, "linear_num_value_heads": 2}
    ),
    "smollm3": Case("smollm3", "SmolLM3ForCausalLM", {"num_hidden_layers": 5}),
    "phi3": Case("phi3", "Phi3ForCausalLM", {"sliding_window": 24}),
    "phi3 without a window": Case("phi3", "Phi3ForCausalLM"),
}


def strong(folder: Path, name: str, tied: bool = False) -> Any:
    """Save a transformers model with strong random weights into a folder."""
    case = CASES[name]
    # the converter omits Gemma's head
    tied = tied or case.architecture in ("gemma", "gemma2")
    sizes = {"sinks": 2.0, "gate_up_proj_bias": 2.0, "gate_up_proj": 0.6}  # gpt-oss
    usual = {"rope_parameters": ROPE, "sizes": sizes, **COMMON}
    # transformers modifies its arguments
    config = deepcopy({**usual, **case.config, "tie_word_embeddings": tied})
    return strong_model(folder, case.class_name, **config)


@pytest.mark.parametrize("tied", [True, False])
# experts of gpt-oss are renamed
@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt-oss"])
def test_weights_and_configuration_there_and_back(tmp_path: Path, name: str, tied: bool) -> None:
    from transformers import AutoConfig

    model = strong(tmp_path / "hf", name, tied)
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", CASES[name].architecture)
    folder = described(path, tmp_path / "cache")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    tensors = tensors_in(folder)
    assert tensors.keys() == weights.keys()
    for tensor, values in weights.items():
        # 1 + w - 1 rounds like 1 + w
        rounding = 1.2e-7 if CASES[name].architecture in PLUS_ONE else 0
        np.testing.assert_allclose(tensors[tensor], values, rtol=0, atol=rounding, err_msg=tensor)

    config = AutoConfig.from_pretrained(folder)
    assert type(config) is type(model.config)
    assert config.architectures == [type(model).__name__]
    added = {
        "architectures",
        "dtype",
        "nano_inference_converted_from",
        "nano_inference_heads_in_tiles",
        "_name_or_path",
        "transformers_version",
        # two aliases of one setting; LFM2 reads the other one
        *(("rms_norm_eps",) if "norm_eps" in CASES[name].config else ()),
        # transformers uses another rope type for GGUF's frequency factors
        *(("rope_parameters",) if CASES[name].config.get("rope_parameters") is LLAMA3 else ()),
    }
    ours, theirs = config.to_dict(), model.config.to_dict()
    for key in ours.keys() | theirs.keys():
        assert key in added or ours.get(key) == theirs.get(key), key


@pytest.mark.thorough(
    cases=["deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "olmoe", "qwen2moe", *list(CASES)[::2]]
)
@pytest.mark.parametrize("name", CASES)
def test_file_agrees_with_transformers_at_every_position(tmp_path: Path, name: str) -> None:
    oracle = strong(tmp_path / "hf", name)
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", CASES[name].architecture)
    assert disagreement(described(path, tmp_path / "cache"), oracle) < TOLERANCE


def test_old_latent_file_agrees_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old files make keys and values with one tensor, and their metadata counts heads as
    transformers does. They have no expert groups.
    """

    def whole(_config: Any, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        renamed = ("e_score_correction_bias", "e_score_correction.bias")
        return {name.replace(*renamed): values for name, values in weights.items()}

    monkeypatch.setattr("tests.checkpoints.hf_to_gguf.latents_apart", whole)
    monkeypatch.setitem(
        CASES,  # pyright: ignore[reportArgumentType]
        "before",
        Case("deepseek2", "DeepseekV3ForCausalLM", {**LATENTS, "n_group": 1, "topk_group": 1}),
    )
    oracle = strong(tmp_path / "hf", "before")
    changes: dict[str, Any] = {
        "attention.head_count_kv": 4,
        "attention.key_length": 48,
        "attention.value_length": 48,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "expert_group_count": None,
        "expert_group_used_count": None,
    }
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "deepseek2", **changes)
    assert disagreement(described(path, tmp_path / "cache"), oracle) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 3}, "expert_gating_func is 3; expected 1"),
        ({"attention.key_length_mla": 16}, "heads of 16 and 48 numbers, 16 of them rotary"),
        ({"attention.value_length_mla": 32}, "by its metadata"),
        ({"attention.kv_lora_rank": None}, "attention.kv_lora_rank is None"),
    ],
)
def test_mismatched_latents_are_rejected(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    strong(tmp_path / "hf", "deepseek-v2")
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "deepseek2", **changes)
    with pytest.raises(ModelLoadError, match=message):
        described(path, tmp_path / "cache")


def test_keys_and_values_of_several_heads_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uneven(*arguments: Any) -> dict[str, np.ndarray]:
        tensors = tensors_of(*arguments)
        tensors["blk.0.attn_k_b.weight"] = tensors["blk.0.attn_k_b.weight"][:2].copy()
        return tensors

    monkeypatch.setattr("tests.checkpoints.hf_to_gguf.tensors_of", uneven)
    strong(tmp_path / "hf", "deepseek-v2")
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "deepseek2")
    with pytest.raises(ModelLoadError, match=r"attn_k_b.*attn_v_b.* must have equal head counts"):
        described(path, tmp_path / "cache")


@pytest.mark.thorough(cases=["deepseek-v3-Q4_1"])
@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("name", ["llama 3", "mixtral", "deepseek-v3"])
def test_quantised_file_agrees_with_its_dequantised_weights(
    tmp_path: Path, name: str, quantisation: str
) -> None:
    oracle = strong(tmp_path / "hf", name)
    kind = gguf.GGMLQuantizationType[quantisation]

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        coded = gguf.quantize(numbers.detach().contiguous().numpy(), kind)
        return torch.from_numpy(gguf.dequantize(coded, kind))

    for parameter_name, parameter in oracle.named_parameters():
        if "kv_b_proj" in parameter_name:  # the key part is stored transposed
            keys, values = parameter.unflatten(0, (4, -1)).split([32, 48], dim=1)
            parts = (rounded(keys.transpose(1, 2)).transpose(1, 2), rounded(values))
            parameter.data = torch.cat(parts, dim=1).flatten(0, 1)
        elif parameter.dim() > 1:
            parameter.data = rounded(parameter)
    architecture = CASES[name].architecture
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", architecture, matrices=kind)
    folder = described(path, tmp_path / "cache")
    assert disagreement(folder, oracle) < TOLERANCE


def test_gate_and_up_of_several_shapes_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uneven(*arguments: Any) -> dict[str, np.ndarray]:
        tensors = tensors_of(*arguments)
        gate, up = (f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up"))
        whole = np.concatenate((tensors[gate], tensors[up]), axis=1)
        tensors[gate], tensors[up] = whole[:, :1].copy(), whole[:, 1:].copy()
        return tensors

    monkeypatch.setattr("tests.checkpoints.hf_to_gguf.tensors_of", uneven)
    strong(tmp_path / "hf", "granitemoe")
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "granitemoe")
    with pytest.raises(
        ModelLoadError, match=r"ffn_gate_exps.*ffn_up_exps.* must have the same shape"
    ):
        described(path, tmp_path / "cache")


@pytest.mark.thorough
def test_experts_in_mxfp4_agree_with_their_dequantised_weights(tmp_path: Path) -> None:
    oracle = strong(tmp_path / "hf", "gpt-oss")
    kind = gguf.GGMLQuantizationType.MXFP4
    for name, parameter in oracle.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            rows = parameter.detach().swapaxes(1, 2).contiguous().numpy()
            coded = gguf.dequantize(gguf.quantize(rows, kind), kind)
            parameter.data = torch.from_numpy(coded).swapaxes(1, 2).contiguous()
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "gpt-oss", experts=kind)
    folder = described(path, tmp_path / "cache")
    assert disagreement(folder, oracle) < TOLERANCE


def gemma3_config(
    tmp_path: Path, extra: Mapping[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    strong(tmp_path / "hf", "gemma3", tied=True)
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "gemma3", extra=extra, **changes)
    folder = described(path, tmp_path / "cache")
    generation = json.loads((folder / "generation_config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    return config


def test_gemma3_fills_in_missing_metadata(tmp_path: Path) -> None:
    config = gemma3_config(tmp_path)
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["attn_logit_softcapping"] is None
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2


def test_gemma3_reads_optional_metadata(tmp_path: Path) -> None:
    optional = {
        "rope.freq_base_swa": 300.0,
        "attention.sliding_window_pattern": 3,
    }
    config = gemma3_config(tmp_path, **optional)
    assert config["rope_local_base_freq"] == 300.0
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [2, 5]


def test_gemma3_scales_one_rope(tmp_path: Path) -> None:
    from transformers import AutoConfig

    gemma3_config(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    (folder,) = (each.parent for each in (tmp_path / "cache").glob("*/config.json"))
    rope = AutoConfig.from_pretrained(folder).rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_gemma3_chat_model_stops_at_end_of_turn(tmp_path: Path) -> None:
    extra = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eos_token_id": 106}
    assert gemma3_config(tmp_path, extra)["eos_token_id"] == [1, 106]


@pytest.mark.parametrize("num_layers", [26, 62])
def test_query_scale_of_the_largest_gemma3(num_layers: int) -> None:
    # 27B: 5376 / 32 = 168, recognised by its 62 layers. All other sizes use head_dim.
    config = {
        "num_hidden_layers": num_layers,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    assert FAMILIES["gemma3"].defaults(config)["query_pre_attn_scalar"] == (
        168 if num_layers == 62 else 128
    )


@pytest.mark.parametrize("key", ["attention.sliding_window", "rope.freq_base"])
def test_gemma3_rejects_missing_metadata_without_a_default(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"gemma3.{key} is None"):
        gemma3_config(tmp_path, **{key: None})


def test_window_pattern_may_name_each_layer(tmp_path: Path) -> None:
    config = gemma3_config(
        tmp_path, **{"attention.sliding_window_pattern": [True, False, *[True] * 5]}
    )
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [1]


def test_window_pattern_of_wrong_length_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"layer_types .* must have 7 entries"):
        gemma3_config(tmp_path, **{"attention.sliding_window_pattern": [True, True, False]})


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def tokenizer_of(
    tmp_path: Path, architecture: str, vocabulary: Mapping[str, int], **extra: Any
) -> Tokenizer:
    """Return the converted tokenizer of a file. `vocabulary`: token -> type, in order, best merge
    first.
    """
    tokens = {
        "tokenizer.ggml.tokens": list(vocabulary),
        "tokenizer.ggml.token_type": list(vocabulary.values()),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(vocabulary))],
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }
    path = write_gguf(tmp_path / "m.gguf", {}, {**TOKEN_IDS, **tokens}, architecture)
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(path, tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


def test_tokenizer_of_gemma3(tmp_path: Path) -> None:
    specials = {
        "<pad>": CONTROL,
        "<eos>": CONTROL,
        "<bos>": CONTROL,
        "<unk>": CONTROL,
        "<mask>": CONTROL,
    }
    runs = {"\n": USER_DEFINED, "\n\n": USER_DEFINED, "  ": USER_DEFINED, "<b>": USER_DEFINED}
    in_bytes = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    pieces = dict.fromkeys(["he", "▁he", "▁", "h", "e", "1", "2", "<", "b", ">"], NORMAL)
    vocabulary = {**specials, **runs, **in_bytes, **pieces}
    ids = {token: i for i, token in enumerate(vocabulary)}
    model = {"model": "llama", "pre": "default", "add_bos_token": True, "add_space_prefix": False}
    special_ids = {
        "bos_token_id": 2,
        "eos_token_id": 1,
        "padding_token_id": 0,
        "unknown_token_id": 3,
    }
    tokenizer = tokenizer_of(tmp_path, "gemma3", vocabulary, **model, **special_ids)
    expected = {
        "he": ["he"],  # no leading space is added
        " he": ["▁he"],
        "he  he": ["he", "  ", "he"],
        "he\n\n\nhe": ["he", "\n\n", "\n", "he"],
        "12": ["1", "2"],
        "<b>": ["<b>"],
        "é": ["<0xC3>", "<0xA9>"],
        "e\u0301": ["e", "<0xCC>", "<0x81>"],
    }
    for text, tokens in expected.items():
        assert tokenizer.encode(text) == [ids[token] for token in tokens], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("he", add_special_tokens=True) == [2, ids["he"]]
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (1, len(vocabulary))


def test_tokenizer_of_qwen_composes_accents(tmp_path: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = {
        **dict.fromkeys(sorted(ByteLevel.alphabet()), NORMAL),
        "Ã©": NORMAL,
        "<|im_end|>": CONTROL,
    }
    end = len(vocabulary) - 1
    model = {
        "model": "gpt2",
        "pre": "qwen2",
        "merges": ["Ã ©"],
        "bos_token_id": end,
        "eos_token_id": end,
    }
    tokenizer = tokenizer_of(tmp_path, "qwen2", vocabulary, **model)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é") == [end - 1]
    assert len(tokenizer.encode("12 34")) == 5
    assert tokenizer.encode("<|im_end|>") == [end]
