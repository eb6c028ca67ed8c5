"""Models by the names that the benchmarks use. One is made from a seed: its shape is real and its
weights are noise.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from nano_inference.cache_folder import cache_folder
from nano_inference.models.loading import resolve_model
from nano_inference.models.spec import spec_from_config
from nano_inference.models.weights import param_table, slots

CACHE = cache_folder("benchmarks")
RANDOM_QWEN = "qwen3-0.6b-random"
STD = 0.02
QWEN_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def model_path(name: str) -> Path:
    """The folder of a model: any path that the engine takes, or `qwen3-0.6b-random`, made when
    first asked for.
    """
    return random_qwen(CACHE / RANDOM_QWEN) if name == RANDOM_QWEN else resolve_model(name)


def random_qwen(folder: Path, seed: int = 0) -> Path:
    """Write the shape of Qwen3-0.6B with normal weights, and SmolLM2's tokenizer, which peers want
    to see.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, slot in slots(param_table(spec_from_config(QWEN_CONFIG))).items():
        if len(slot.shape) == 1:
            weights[name] = torch.ones(slot.shape, dtype=torch.bfloat16)
        else:
            weights[name] = (torch.randn(slot.shape, generator=generator) * STD).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("smollm2-135m") / name, folder)
    # last: it says that all is there
    (folder / "config.json").write_text(json.dumps(QWEN_CONFIG, indent=1) + "\n")
    return folder
