"""Small GGUF files and their weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from nano_inference.checkpoints.gguf.file import describe_gguf
from nano_inference.checkpoints.gguf.weights import GgufReader
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.ops.formats import FORMATS

gguf = pytest.importorskip("gguf")

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 40, 4, 2, 16, 2
METADATA: Mapping[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def hf_weights(tied: bool = True) -> dict[str, np.ndarray]:
    """Return random Hugging Face weights of a tiny Llama, keyed by GGUF's names."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def permute_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute query or key rows as llama.cpp's `convert_hf_to_gguf.py` does."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def stored_weights(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    stored = dict(weights)
    for name, weight in weights.items():
        if "attn_q" in name or "attn_k" in name:
            stored[name] = permute_rows(weight, HEADS if "attn_q" in name else KV_HEADS)
    return stored


def quantised(tensor: np.ndarray, kind: Any) -> np.ndarray:
    """Return a tensor in blocks. The gguf package does not write IQ4_NL and IQ4_XS."""
    if kind.name not in ("IQ4_NL", "IQ4_XS"):
        return gguf.quantize(tensor, kind)
    groups = tensor.reshape(-1, 32)
    values = np.array(FORMATS["iq4-32"].values, np.float32)
    scales = np.abs(groups).max(axis=1) / -values[0]
    if kind.name == "IQ4_NL":
        scales = scales.astype(np.float16)
        heads, scales = scales.view(np.uint8).reshape(-1, 2), scales.astype(np.float32)
    else:
        steps = (scales.reshape(-1, 8).max(axis=1) / 31).astype(np.float16)
        whole = np.round(scales.reshape(-1, 8) / steps[:, None].astype(np.float32)).astype(int)
        stored, scales = whole + 32, (whole * steps[:, None].astype(np.float32)).reshape(-1)
        high = (stored >> 4 << 2 * np.arange(8)).sum(axis=1).astype(np.uint16)
        low = (stored[:, ::2] & 15 | (stored[:, 1::2] & 15) << 4).astype(np.uint8)
        parts = (each.view(np.uint8).reshape(len(steps), -1) for each in (steps, high, low))
        heads = np.concatenate([*parts], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.abs((groups / scales[:, None])[..., None] - values)
    codes = apart.argmin(axis=-1).astype(np.uint8)
    codes = (codes[:, :16] | codes[:, 16:] << 4).reshape(len(heads), -1)
    return np.concatenate((heads, codes), axis=1).reshape(*tensor.shape[:-1], -1)


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any] = METADATA,
    architecture: str = "llama",
    types: Mapping[str, Any] | None = None,
    raw: Mapping[str, tuple[np.ndarray, Any]] | None = None,
) -> Path:
    """Write a GGUF file.

    Args:
        path: Path of the file.
        tensors: Tensors by name.
        types: Quantisation by tensor name. Other tensors are stored as they are.
        raw: Blocks and their type by name, in addition to `tensors` or instead of them.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        add[type(value)](key, value)
    for name, (blocks, kind) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    for name, tensor in tensors.items():
        if raw and name in raw:
            continue
        if types and name in types:
            writer.add_tensor(name, quantised(tensor, types[name]), raw_dtype=types[name])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def described(path: Path, root: Path, *, coded: bool = False) -> Path:
    """Return the folder that describes a file, without a tokenizer. Run all checks that loading
    runs before it allocates memory.
    """
    folder = describe_gguf(path, root, tokenizer_writer=lambda *_: None, coded=coded)
    GgufReader(path)
    return folder


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors that loading reads from any model folder, including one that describes a
    file.
    """
    return dict(read_tensors(folder))
