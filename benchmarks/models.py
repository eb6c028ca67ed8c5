"""Models of the benchmarks by name. Some are made from a seed: real shapes with random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.mtp import trained_model
from nano_inference.checkpoints.gguf.file import described_by
from nano_inference.checkpoints.loading import resolve_model
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.read import spec_from_config
from nano_inference.rl.checkpoint import as_stored, checkpoint_of
from nano_inference.system.cache_folder import cache_folder

CACHE = cache_folder("benchmarks")
STD = 0.02
FULL = 2**30  # bytes of a file of weights
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
# Three layers of the gated delta rule per layer of gated attention, as in Qwen3.5-0.8B: 0.63
# billion weights.
QWEN35_CONFIG = QWEN_CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 24,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
# Sixteen of the 32 layers of Qwen3.5-4B: 2.4 billion weights. Two value heads share a key head.
QWEN35_4B_CONFIG = QWEN35_CONFIG | {
    "hidden_size": 2560,
    "num_hidden_layers": 16,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 9216,
    "linear_num_value_heads": 32,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "rope_theta": 10_000_000.0,
}
# Half of Qwen3-30B-A3B's widths, a quarter of its experts: 0.84 billion weights, of which 0.32
# compute a token.
MOE_CONFIG = QWEN_CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 16,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Qwen3-4B: 4.02 billion weights
QWEN_4B_CONFIG = QWEN_CONFIG | {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
}
# Eight of the 48 layers of Qwen3-30B-A3B: 5.6 billion weights, of which 0.8 compute a token
QWEN_30B_A3B_CONFIG = QWEN_CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
# Half of the 36 layers of Qwen3-8B: 4.7 billion weights
QWEN_8B_CONFIG = QWEN_CONFIG | {
    "hidden_size": 4096,
    "num_hidden_layers": 18,
    "num_attention_heads": 32,
    "intermediate_size": 12_288,
    "tie_word_embeddings": False,
}
# Four of the 24 layers of gpt-oss-20b: 4.5 billion weights, of which 1.7 compute a token
GPT_OSS_CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "initial_context_length": 4096,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
# The text part of Gemma 3 4B: 3.9 billion weights
GEMMA3_4B_CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 10_240,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
# Four layers of Qwen3-0.6B, for contexts that all 28 would take long to compute
QWEN_4_LAYERS_CONFIG = QWEN_CONFIG | {"num_hidden_layers": 4}
RANDOM = {
    "qwen3-4-layers-random": QWEN_4_LAYERS_CONFIG,
    "qwen3-0.6b-random": QWEN_CONFIG,
    "qwen3-4b-random": QWEN_4B_CONFIG,
    "qwen3-8b-18-layers-random": QWEN_8B_CONFIG,
    "gpt-oss-20b-4-layers-random": GPT_OSS_CONFIG,
    "gemma3-4b-random": GEMMA3_4B_CONFIG,
    "qwen3-30b-a3b-8-layers-random": QWEN_30B_A3B_CONFIG,
    "qwen3.5-0.6b-random": QWEN35_CONFIG,
    "qwen3.5-4b-16-layers-random": QWEN35_4B_CONFIG,
    "qwen3-moe-0.8b-random": MOE_CONFIG,
}


WITH_MTP = "smollm2-135m-mtp"


def model_path(name: str) -> Path:
    """Return a model's folder, which peers load too: any path that the engine accepts, or one of
    `RANDOM` or `WITH_MTP`, made at its first use.
    """
    if name in RANDOM:
        return random_model(CACHE / name, RANDOM[name])
    if name == WITH_MTP:
        return trained_model(CACHE / name, model_path("smollm2-135m"))
    source = resolve_model(name)
    if described_by(source) is None:
        return source
    saved = CACHE / f"{source.name}-bfloat16"
    if not (saved / "model.safetensors").exists():
        checkpoint_of(name, saved, torch.bfloat16)
    return saved


def random_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write a shape with normal weights, and with SmolLM2's tokenizer, which peers require."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    spec = spec_from_config(config)
    files = _Files(folder)
    for param in param_table(spec):
        drawn = {source.name: _drawn(source.shape, generator) for source in param.sources}
        files.add(as_stored(drawn, spec, (param,)))
    files.close()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(resolve_model("smollm2-135m") / name, folder)
    # last, because it marks the folder as complete
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return ones for a vector, and normal numbers for a matrix."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * STD).bfloat16()


class _Files:
    """Files of a checkpoint with their index, written when they are full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: list[list[str]] = []  # by file

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        if sum(tensor.nbytes for tensor in self._tensors.values()) > FULL:
            self._write()

    def close(self) -> None:
        self._write()
        places = {name: _file(at) for at, names in enumerate(self._names) for name in names}
        index = json.dumps({"weight_map": places}, indent=1)
        (self._folder / "model.safetensors.index.json").write_text(f"{index}\n")

    def _write(self) -> None:
        if self._tensors:
            path = self._folder / _file(len(self._names))
            save_file(self._tensors, path, metadata={"format": "pt"})
            self._names.append([*self._tensors])
            self._tensors = {}


def _file(number: int) -> str:
    return f"model-{number:05}.safetensors"
