"""Sources and costs of GGUF files: split files, folders, header-only reads, memory and disk."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.folders import describe_model, load_spec, resolve_model
from nano_inference.checkpoints.gguf import weights as gguf_weights
from nano_inference.checkpoints.gguf.file import describe_gguf
from nano_inference.checkpoints.gguf.header import StoredTensor
from nano_inference.checkpoints.gguf.weights import GgufReader
from nano_inference.errors import ModelLoadError
from tests.checkpoints.test_gguf_llama3 import split
from tests.cli.running import run
from tests.models.tiny_gguf import (
    HIDDEN,
    METADATA,
    gguf,
    hf_weights,
    stored_weights,
    write_gguf,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nano-inference" / "gguf"


def completion(model: Path) -> tuple[int, ...]:
    config = EngineConfig(str(model), kv_cache_memory=2**22, dtype="float32", device="cpu")
    with InferenceEngine(config) as engine:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        return engine.generate([[5, 6, 7]], params)[0].completion_tokens


@pytest.mark.usefixtures("cache")
def test_folder_of_parts_is_the_model(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", stored_weights(hf_weights()))
    (tmp_path / "parts").mkdir()
    parts = split(tmp_path / "parts", stored_weights(hf_weights()))
    (tmp_path / "parts" / "mmproj-F16.gguf").write_bytes(b"GGUF of another kind")
    assert resolve_model(str(tmp_path / "parts")) == resolve_model(str(parts[1]))
    assert completion(tmp_path / "parts") == completion(whole)
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00003\.gguf is missing"):
        resolve_model(str(tmp_path / "parts"))


def test_folder_of_several_models_is_rejected_with_choices(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        write_gguf(tmp_path / name, stored_weights(hf_weights()))
    with pytest.raises(
        ModelLoadError, match=r"contains 2 GGUF models; name one .*: a-Q4_0\.gguf, a-Q8_0\.gguf"
    ):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path


def sparse_llama(path: Path, layers: int = 80, hidden: int = 8192, inner: int = 28672) -> int:
    """Write the header of a 70B Llama in Q4_0 with a sparse hole for the weights; return the file's
    size.
    """
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": 64,
        "attention.head_count_kv": 8,
    }
    for key, value in values.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    kv = hidden // 8
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (128256, hidden), "output_norm": (hidden,)}
    shapes["output"] = shapes["token_embd"]
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (hidden,),
                "attn_q": (hidden, hidden),
                "attn_k": (kv, hidden),
                "attn_v": (kv, hidden),
                "attn_output": (hidden, hidden),
                "ffn_norm": (hidden,),
                "ffn_gate": (inner, hidden),
                "ffn_up": (inner, hidden),
                "ffn_down": (hidden, inner),
            }.items()
        }
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), 4 * shape[0])
            continue
        coded = (shape[0], shape[1] // 32 * 18)
        kind = gguf.GGMLQuantizationType.Q4_0
        size = coded[0] * coded[1]
        writer.add_tensor_info(f"{name}.weight", coded, np.dtype(np.uint8), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    reserved = sum(
        int(np.prod(shape)) * 4 if len(shape) == 1 else int(np.prod(shape)) // 32 * 18
        for shape in shapes.values()
    )
    size = -(-path.stat().st_size // 32) * 32 + reserved
    with path.open("ab") as file:
        file.truncate(size)
    return size


def test_info_reads_only_the_header(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> Any:
        raise AssertionError("it read past the header")

    monkeypatch.setattr(StoredTensor, "rows", read)
    size = sparse_llama(tmp_path / "huge.gguf")
    assert size > 39 * 10**9
    assert (tmp_path / "huge.gguf").stat().st_blocks * 512 < 2**20
    result = run(
        "info",
        str(tmp_path / "huge.gguf"),
        "--json",
        "--kv-cache-memory",
        "64MiB",
        "--dtype",
        "bfloat16",
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["num_parameters"] == 70_553_706_496
    assert report["tokenizer"] is None
    (folder,) = cache.iterdir()
    assert sorted(each.name for each in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
    ]


def test_truncated_file_is_rejected_by_its_header(tmp_path: Path) -> None:
    size = sparse_llama(tmp_path / "huge.gguf")
    with (tmp_path / "huge.gguf").open("ab") as file:
        file.truncate(size - 1)
    with pytest.raises(ModelLoadError, match=r"the tensor blk\.79\.\w+\.weight extends past"):
        describe_gguf(tmp_path / "huge.gguf", tmp_path / "cache")


def test_description_equals_the_loaded_folder(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()))
    folder = describe_model(str(path))
    assert load_spec(resolve_model(str(path))) == load_spec(folder)
    assert describe_model(str(path)) == folder
    other = write_gguf(
        tmp_path / "o.gguf", stored_weights(hf_weights()), {**METADATA, "llama.context_length": 64}
    )
    assert describe_model(str(other)) != folder
    assert load_spec(describe_model(str(other))).max_position == 64
    assert len(list(cache.iterdir())) == 3


def test_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a tensor takes the memory of its numbers plus a few float32 pieces that are
    dequantised at a time.
    """
    monkeypatch.setattr(gguf_weights, "CHUNK", 2**16)
    vocab = 2**16
    tensors = stored_weights(hf_weights())
    tensors["token_embd.weight"] = np.ones((vocab, HIDDEN), np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    types = {name: kind for name, tensor in tensors.items() if tensor.ndim > 1}
    path = write_gguf(tmp_path / "m.gguf", tensors, types=types)
    weight = GgufReader(path, torch.bfloat16).get_slice("model.embed_tokens.weight")
    assert weight[:10].dtype == torch.bfloat16  # import large modules before measuring
    tracemalloc.start()
    whole = weight[:]  # torch's memory is not counted
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (whole == 1).all()
    assert peak < 16 * 2**16
