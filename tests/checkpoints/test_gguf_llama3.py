"""GGUF files of newer Llamas: rotary frequency factors and split files."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference.checkpoints.folders import load_spec
from nano_inference.errors import ModelLoadError
from nano_inference.models.rope import rope_table
from tests.models.tiny_gguf import (
    HEAD_DIM,
    METADATA,
    described,
    gguf,
    hf_weights,
    stored_weights,
    tensors_in,
    write_gguf,
)

SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
THETA = METADATA["llama.rope.freq_base"]
Arrays = dict[str, np.ndarray]


def rope_factors() -> np.ndarray:
    """Return the factors that llama.cpp's `convert_hf_to_gguf.py` writes
    (`LlamaModel.generate_extra_tensors`).
    """
    low, high, context = (
        SCALING["low_freq_factor"],
        SCALING["high_freq_factor"],
        SCALING["original_max_position_embeddings"],
    )
    factors = []
    for frequency in THETA ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM):
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(SCALING["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / SCALING["factor"] + smooth))
    assert {1.0, 8.0} < set(factors), "a frequency band is missing"
    return np.array(factors, dtype=np.float32)


def with_factors(path: Path, factors: np.ndarray, **changes: Any) -> Path:
    return write_gguf(
        path, stored_weights(hf_weights()) | {"rope_freqs.weight": factors}, {**METADATA, **changes}
    )


@pytest.mark.filterwarnings("ignore")
def test_rope_freqs_equal_llama3_scaling(tmp_path: Path) -> None:
    # slow to import
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    factors = rope_factors()
    folder = described(with_factors(tmp_path / "m.gguf", factors), tmp_path / "cache")
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": HEAD_DIM}
    llama3 = {"rope_type": "llama3", "rope_theta": THETA, **SCALING}
    llama = LlamaRotaryEmbedding(
        LlamaConfig(**sizes, max_position_embeddings=4096, rope_parameters=llama3)
    )
    positions = torch.arange(4096, dtype=torch.float64)
    angles = positions[:, None] * llama.inv_freq.double()
    cos, sin = rope_table(load_spec(folder).ropes[0], HEAD_DIM, 4096, torch.device("cpu"))
    # Angles up to 4,096 have a float32 rounding error of 2.4e-4.
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=1e-3)
    # transformers reads the folder too: the same frequencies under its own name.
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"]["short_factor"] == [float(each) for each in factors]
    rotary = LlamaRotaryEmbedding(LlamaConfig(**config))
    torch.testing.assert_close(rotary.inv_freq, llama.inv_freq, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == llama.attention_scaling == 1.0


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    folder = described(
        with_factors(tmp_path / "m.gguf", np.ones(HEAD_DIM // 2, np.float32)), tmp_path / "cache"
    )
    assert load_spec(folder).ropes[0].kind == "default"


@pytest.mark.parametrize(
    ("factors", "changes", "message"),
    [
        (np.ones(4, np.float32), {}, "rope_freqs.weight must hold 8 numbers above 0"),
        (np.array([1.0] * 7 + [0.0], np.float32), {}, "must hold 8 numbers above 0"),
        (np.array([1.0] * 7 + [np.nan], np.float32), {}, "must hold 8 numbers above 0"),
        (
            np.full(8, 2.0, np.float32),
            {"llama.rope.scaling.factor": 4.0},
            "only one is supported",
        ),
    ],
)
def test_implausible_rope_factors_are_rejected(
    tmp_path: Path, factors: np.ndarray, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        described(with_factors(tmp_path / "m.gguf", factors, **changes), tmp_path / "cache")


def test_family_without_rope_factors_rejects_them(tmp_path: Path) -> None:
    metadata = {key.replace("llama.", "qwen3."): value for key, value in METADATA.items()}
    tensors = stored_weights(hf_weights()) | {"rope_freqs.weight": rope_factors()}
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata, architecture="qwen3")
    with pytest.raises(ModelLoadError, match=r"tensor rope_freqs\.weight is not supported"):
        described(path, tmp_path / "cache")


# -- split files -----------------------------------------------------------------------------------


def split(folder: Path, tensors: Arrays, parts: int = 3) -> list[Path]:
    """Split a file as `gguf-split` does: all metadata in the first part, tensors spread over the
    parts in order.
    """
    names = list(tensors)
    size = -(-len(names) // parts)
    paths: list[Path] = []
    for part in range(parts):
        shard = {name: tensors[name] for name in names[part * size : (part + 1) * size]}
        metadata = {"split.no": part, "split.count": parts, "split.tensors.count": len(tensors)}
        path = folder / f"m-{part + 1:05}-of-{parts:05}.gguf"
        paths.append(write_gguf(path, shard, {**(METADATA if part == 0 else {}), **metadata}))
    return paths


def require_same_tensors(one: Path, other: Path) -> None:
    tensors, wanted = tensors_in(one), tensors_in(other)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_split_file_is_the_same_model(tmp_path: Path) -> None:
    tensors = stored_weights(hf_weights()) | {"rope_freqs.weight": rope_factors()}
    whole = described(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "cache")
    parts = split(tmp_path, tensors)
    folders = {described(part, tmp_path / "cache") for part in parts}
    assert len(folders) == 1
    assert folders.isdisjoint({whole})
    (folder,) = folders
    require_same_tensors(folder, whole)
    for name in ("config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_missing_part_is_named(tmp_path: Path) -> None:
    parts = split(tmp_path, stored_weights(hf_weights()))
    parts[1].unlink()
    for part in (parts[0], parts[1], parts[2]):
        with pytest.raises(
            ModelLoadError, match=r"m-00002-of-00003\.gguf is missing.*all 3 parts.*2 are there"
        ):
            described(part, tmp_path / "cache")


def test_misnamed_part_error_explains_part_names(tmp_path: Path) -> None:
    parts = split(tmp_path, stored_weights(hf_weights()))
    with pytest.raises(
        ModelLoadError, match=r"one of 3 parts; put them .* names NAME-00001-of-00003\.gguf"
    ):
        described(parts[0].rename(tmp_path / "model.gguf"), tmp_path / "cache")


def test_parts_of_two_files_are_rejected(tmp_path: Path) -> None:
    tensors = stored_weights(hf_weights())
    parts = split(tmp_path, tensors)
    (tmp_path / "other").mkdir()
    less = dict(list(tensors.items())[:-2])
    other = split(tmp_path / "other", less)
    parts[2].write_bytes(other[2].read_bytes())
    with pytest.raises(
        ModelLoadError,
        match=r"have \d+ tensors, but the first declares|is in m-00003.*an earlier part",
    ):
        described(parts[0], tmp_path / "cache")


def test_split_file_equals_parts_of_the_gguf_writer(tmp_path: Path) -> None:
    tensors = stored_weights(hf_weights())
    writer = gguf.GGUFWriter(tmp_path / "own.gguf", "llama", split_max_tensors=8)
    for key, value in METADATA.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("own-*-of-*.gguf"))
    assert len(parts) > 1
    whole = described(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "cache")
    folder = described(parts[0], tmp_path / "cache")
    require_same_tensors(folder, whole)
