"""Every family of GGUF files there and back: transformers' own weights, named by the gguf package,
converted.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from nano_inference.errors import ModelLoadError
from nano_inference.models.gguf import convert_gguf, write_tokenizer
from nano_inference.models.gguf_families import FAMILIES
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.models.tiny_gguf import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    gguf,
    permute_rows,
    write_gguf,
)

LAYERS = 7  # one more than Gemma's period
KEYS: Mapping[str, Any] = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 2.0**-20,
    "rope.freq_base": 5000.0,
}
FAMILY_KEYS: Mapping[str, Mapping[str, Any]] = {"gemma3": {"attention.sliding_window": 24}}
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-20,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# What a repository of such a model says in its config.json, beyond COMMON.
HF_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_theta": 5000.0},
    "qwen2": {"rope_theta": 5000.0},
    "qwen3": {"rope_theta": 5000.0},
    "gemma3": {
        "rope_theta": 5000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 24,
        "query_pre_attn_scalar": HEAD_DIM,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    },
}


def metadata(architecture: str, **changes: Any) -> dict[str, Any]:
    keys = {**KEYS, **FAMILY_KEYS.get(architecture, {}), **changes}
    token_ids = {
        f"tokenizer.ggml.{key}_token_id": i for i, key in enumerate(("padding", "bos", "eos"))
    }
    return {
        **{f"{architecture}.{key}": value for key, value in keys.items() if value is not None},
        **token_ids,
    }


def hf_model(architecture: str, tied: bool) -> Any:
    """transformers' model of a family with random weights that survive + 1 - 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        FAMILIES[architecture].model_type,
        **COMMON,
        **HF_CONFIGS[architecture],
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randint(-64, 64, parameter.shape, generator=generator) / 64
    return model


def hf_weights(model: Any, tied: bool) -> dict[str, np.ndarray]:
    """The weights as a checkpoint stores them."""
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if tied:
        del weights["lm_head.weight"]
    return weights


def stored(architecture: str, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GGUF's names, by the package's own table, and GGUF's values, by what llama.cpp's converters
    do.
    """
    (code,) = (code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(code, LAYERS)
    tensors: dict[str, np.ndarray] = {}
    for name, values in weights.items():
        if architecture == "llama" and "q_proj" in name:
            values = permute_rows(values, HEADS)
        if architecture == "llama" and "k_proj" in name:
            values = permute_rows(values, KV_HEADS)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


def convert(path: Path, root: Path) -> Path:
    return convert_gguf(path, root, tokenizer_writer=lambda path, folder: None)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_weights_and_configuration_there_and_back(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    from transformers import AutoConfig

    model = hf_model(architecture, tied)
    weights = hf_weights(model, tied)
    tensors = stored(architecture, weights)
    folder = convert(
        write_gguf(tmp_path / "m.gguf", tensors, metadata(architecture), architecture),
        tmp_path / "cache",
    )
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(converted[name], values, err_msg=name)

    config = AutoConfig.from_pretrained(folder)
    assert type(config) is type(model.config)
    assert config.architectures == [type(model).__name__]
    added = {
        "architectures",
        "dtype",
        "nano_inference_converted_from",
        "_name_or_path",
        "transformers_version",
    }
    ours, theirs = config.to_dict(), model.config.to_dict()
    for key in ours.keys() | theirs.keys():
        assert key in added or ours.get(key) == theirs.get(key), key


def gemma3_config(
    tmp_path: Path, extra: Mapping[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    tensors = stored("gemma3", hf_weights(hf_model("gemma3", tied=True), tied=True))
    path = write_gguf(
        tmp_path / "m.gguf",
        tensors,
        {**metadata("gemma3", **changes), **(extra or {})},
        architecture="gemma3",
    )
    folder = convert(path, tmp_path / "cache")
    generation = json.loads((folder / "generation_config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    return config


def test_gemma3_says_what_its_file_leaves_out(tmp_path: Path) -> None:
    config = gemma3_config(tmp_path)
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["attn_logit_softcapping"] is None
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2


def test_gemma3_takes_what_its_file_may_say(tmp_path: Path) -> None:
    optional = {
        "rope.freq_base_swa": 300.0,
        "attention.sliding_window_pattern": 3,
        "final_logit_softcapping": 30.0,
    }
    config = gemma3_config(tmp_path, **optional)
    assert config["rope_local_base_freq"] == 300.0
    assert config["final_logit_softcapping"] == 30.0
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [2, 5]


def test_gemma3_scales_one_rope(tmp_path: Path) -> None:
    from transformers import AutoConfig

    gemma3_config(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    (folder,) = (tmp_path / "cache").iterdir()
    rope = AutoConfig.from_pretrained(folder).rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_gemma3_that_chats_also_ends_with_its_turn(tmp_path: Path) -> None:
    extra = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eos_token_id": 106}
    assert gemma3_config(tmp_path, extra)["eos_token_id"] == [1, 106]


@pytest.mark.parametrize("num_layers", [26, 62])
def test_query_scale_of_the_largest_gemma3(num_layers: int) -> None:
    # 27B: 5376 / 32 = 168, by 62 layers. Every other size: head_dim.
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
def test_gemma3_has_no_default_for_what_llama_cpp_would_guess(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"gemma3.{key} is None"):
        gemma3_config(tmp_path, **{key: None})


def test_a_pattern_for_each_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"sliding_window_pattern is \[1, 1, 0\]"):
        gemma3_config(tmp_path, **{"attention.sliding_window_pattern": [1, 1, 0]})


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def tokenizer_of(
    tmp_path: Path, architecture: str, vocabulary: Mapping[str, int], **extra: Any
) -> Tokenizer:
    """The converted tokenizer of a file whose tokens are `vocabulary`: text -> type, in order, best
    merge first.
    """
    tokens = {
        "tokenizer.ggml.tokens": list(vocabulary),
        "tokenizer.ggml.token_type": list(vocabulary.values()),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(vocabulary))],
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }
    path = write_gguf(tmp_path / "m.gguf", {}, {**metadata(architecture), **tokens}, architecture)
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
        "he": ["he"],  # no space is put before
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
