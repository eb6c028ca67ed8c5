"""The text part of classes that also read pictures: their configs, tensor names, and
ignored parts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference import EngineConfig, InferenceEngine, ModelLoadError
from nano_inference.errors import ConfigError
from nano_inference.models.spec.read import spec_from_config
from nano_inference.models.spec.rope import RopeSpec
from nano_inference.rl.checkpoint import require_savable
from tests.models.families import CASES
from tests.models.strong import rewrite_config, strong_model
from tests.models.tiny import llama_config

CASE = CASES["qwen3-vl"]


def checksum(folder: Path) -> dict[str, Any]:
    with engine_of(folder) as engine:
        return engine.weights_checksum()


def engine_of(folder: Path) -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(model_path=str(folder), dtype="float32", device="cpu", kv_cache_memory=2**22)
    )


def test_published_gemma_3_config_uses_defaults() -> None:
    """The config is that of google/gemma-3-4b-it. Missing settings have transformers' defaults."""
    spec = spec_from_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (
        2560,
        34,
        8,
        4,
    )
    assert (spec.head_dim, spec.vocab_size, spec.max_position) == (256, 262208, 131072)
    assert spec.windows[:6] == (1024,) * 5 + (0,)
    assert spec.ropes[0] == RopeSpec(theta=1e4)
    assert spec.ropes[5] == RopeSpec(theta=1e6, kind="linear", factor=8.0)
    assert (spec.tie_word_embeddings, spec.checkpoint_dtype) == (True, "bfloat16")
    assert (spec.activation, spec.eos_token_ids) == ("gelu_tanh", (1, 106))


def test_published_qwen_config_has_flat_text_fields() -> None:
    """The config is that of Qwen/Qwen2.5-VL-3B-Instruct."""
    flat = llama_config() | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"hidden_size": 1280},
        "tie_word_embeddings": True,
    }
    spec = spec_from_config(flat)
    assert (spec.ropes[0], spec.qkv_bias, spec.o_bias) == (RopeSpec(), True, False)
    assert spec.tie_word_embeddings


def test_wrong_value_of_the_text_is_named() -> None:
    config = llama_config() | {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {"hidden_size": -1},
    }
    with pytest.raises(ModelLoadError, match="text_config has hidden_size=-1"):
        spec_from_config(config)


def spelled(name: str, model: str, head: str) -> str:
    """Return the checkpoint spelling of a tensor name that transformers uses in memory."""
    if name == "lm_head.weight":
        return head + name
    if "visual." in name:
        return name.removeprefix("model.")
    return model + name.removeprefix("model.language_model.")


def test_tensor_names_of_all_checkpoint_layouts_are_read(tmp_path: Path) -> None:
    strong_model(tmp_path, CASE.class_name, **CASE.config)
    expected = checksum(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    # Qwen2.5-VL's; Gemma 3's
    for model, head in (("model.", ""), ("language_model.model.", "language_model.")):
        renamed = {spelled(name, model, head): tensor for name, tensor in weights.items()}
        assert len(renamed) == len(weights)
        save_file(renamed, file, metadata={"format": "pt"})
        assert checksum(tmp_path) == expected
    save_file({**weights, "model.visuals.weight": torch.ones(2)}, file)
    with pytest.raises(ModelLoadError, match=r"model\.visuals\.weight' is not part of"):
        checksum(tmp_path)


def test_tied_head_may_have_either_name(tmp_path: Path) -> None:
    case = CASES["mistral3 with pictures"]
    strong_model(tmp_path, case.class_name, **case.config)
    expected, file = checksum(tmp_path), tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights["language_model.model.embed_tokens.weight"].clone()
    save_file({"language_model.lm_head.weight": head, **weights}, file)
    assert checksum(tmp_path) == expected
    save_file({"language_model.lm_head.weight": head + 1, **weights}, file)
    with pytest.raises(ModelLoadError, match="is tied to"):
        checksum(tmp_path)
    rewrite_config(tmp_path, tie_word_embeddings=False)  # then the head is a separate tensor
    assert checksum(tmp_path) != expected


def test_update_may_name_tensors_as_transformers_holds_them(tmp_path: Path) -> None:
    strong_model(tmp_path / "old", CASE.class_name, **CASE.config)
    oracle = strong_model(tmp_path / "new", CASE.class_name, seed=1, **CASE.config)
    expected = checksum(tmp_path / "new")
    with engine_of(tmp_path / "old") as engine:
        assert engine.weights_checksum() != expected
        engine.update_weights(oracle.state_dict(), blocking=True, complete=True)
        assert engine.weights_checksum() == expected
        with pytest.raises(ConfigError, match="hold other tensors in addition to the text"):
            require_savable(tmp_path / "old", engine.spec)
