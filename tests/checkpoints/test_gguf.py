"""GGUF files as models, with small synthetic Llamas. test_gguf_families.py has the other families
and test_gguf_numbers.py the arithmetic.
"""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference.checkpoints.gguf import weights as gguf_weights
from nano_inference.checkpoints.gguf.file import describe_gguf, described_by
from nano_inference.errors import ModelLoadError
from tests.models.tiny_gguf import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    METADATA,
    VOCAB,
    described,
    hf_weights,
    permute_rows,
    stored_weights,
    tensors_in,
    write_gguf,
)

gguf = pytest.importorskip("gguf")


def no_tokenizer(path: Path, folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def files_in(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


def test_round_trip_keeps_every_value(tmp_path: Path) -> None:
    weights = hf_weights(tied=False)
    folder = described(write_gguf(tmp_path / "m.gguf", stored_weights(weights)), tmp_path / "cache")
    tensors = tensors_in(folder)
    expected = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
        "model.layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    assert len(tensors) == len(weights)
    for hf_name, gguf_name in expected.items():
        assert tensors[hf_name].dtype == torch.float32
        np.testing.assert_array_equal(tensors[hf_name], weights[gguf_name])


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_equal_gguf_dequantize(tmp_path: Path, quantisation: str) -> None:
    kind = gguf.GGMLQuantizationType[quantisation]
    stored = stored_weights(hf_weights())
    # Values that the types round, including a permuted tensor.
    types = {"token_embd.weight": kind, "blk.0.attn_q.weight": kind}
    path = write_gguf(tmp_path / "m.gguf", stored, types=types)
    tensors = tensors_in(described(path, tmp_path / "cache"))

    def dequantised(name: str) -> np.ndarray:
        return gguf.dequantize(gguf.quantize(stored[name], kind), kind)

    embedding = tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embedding.float(), dequantised("token_embd.weight"))
    permuted_back = permute_rows(
        tensors["model.layers.0.self_attn.q_proj.weight"].float().numpy(), HEADS
    )
    np.testing.assert_array_equal(permuted_back, dequantised("blk.0.attn_q.weight"))
    kept = {"F16": torch.float16, "BF16": torch.bfloat16}
    assert embedding.dtype == kept.get(quantisation, torch.float32)
    assert tensors["model.layers.0.self_attn.k_proj.weight"].dtype == torch.float32  # as it came
    config = json.loads((described(path, tmp_path / "cache") / "config.json").read_text())
    assert config["torch_dtype"] == ("float16" if quantisation == "F16" else "bfloat16")


WIDE = {**METADATA, "llama.feed_forward_length": 256}  # one block of the largest types


def with_a_tensor_of(path: Path, kind: Any) -> np.ndarray:
    """Write a file with one matrix [HIDDEN, 256] of random blocks; return the blocks too."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (HIDDEN, 256 // block * block_bytes), dtype=np.uint8)
    if kind == gguf.GGMLQuantizationType.MXFP4:  # an exponent of 255 is NaN, which codes reject
        raw[:, ::block_bytes] = np.minimum(raw[:, ::block_bytes], 254)
    tensors = stored_weights(hf_weights()) | {
        f"blk.{layer}.{name}.weight": rng.standard_normal(shape, dtype=np.float32)
        for layer in range(LAYERS)
        for name, shape in (("ffn_gate", (256, HIDDEN)), ("ffn_up", (256, HIDDEN)))
    }
    tensors["blk.1.ffn_down.weight"] = rng.standard_normal((HIDDEN, 256), dtype=np.float32)
    write_gguf(path, tensors, WIDE, raw={"blk.0.ffn_down.weight": (raw, kind)})
    return raw


def is_read(kind: Any) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("name", [each.name for each in gguf.GGMLQuantizationType])
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.filterwarnings("ignore:overflow")
def test_gguf_type_is_read_like_the_gguf_package_or_rejected(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_weights, "CHUNK", 1000)  # pieces of three rows
    kind = gguf.GGMLQuantizationType[name]
    raw = with_a_tensor_of(tmp_path / "m.gguf", kind)
    if not is_read(kind):
        with pytest.raises(
            ModelLoadError,
            match=rf"tensor blk\.0\.ffn_down\.weight has an unsupported type: .*{name}",
        ):
            described(tmp_path / "m.gguf", tmp_path / "cache")
        assert files_in(tmp_path) == [tmp_path / "m.gguf"]
        return
    tensors = tensors_in(described(tmp_path / "m.gguf", tmp_path / "cache"))
    matrix = tensors["model.layers.0.mlp.down_proj.weight"]
    kept = {"F16": torch.float16, "BF16": torch.bfloat16}
    assert matrix.dtype == kept.get(name, torch.float32)
    np.testing.assert_array_equal(matrix.float(), gguf.dequantize(raw, kind))


def test_type_unknown_to_the_gguf_package_is_rejected(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()))
    raw = path.read_bytes()
    name = b"blk.1.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8  # after the dimension count and two sizes
    path.write_bytes(raw[:at] + (211).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(
        ModelLoadError, match=r"blk\.1\.ffn_up\.weight has an unsupported type: .* type 211"
    ):
        described(path, tmp_path / "cache")


def test_config_from_metadata(tmp_path: Path) -> None:
    folder = described(
        write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights())), tmp_path / "cache"
    )
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("rms_norm_eps") == pytest.approx(1e-5)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rope_theta": 5000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "nano_inference_converted_from": "gguf",
    }
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}


def test_untied_head_and_missing_kv_heads(tmp_path: Path) -> None:
    weights = hf_weights(tied=False)
    for layer in range(LAYERS):
        for name in ("attn_k", "attn_v"):
            weights[f"blk.{layer}.{name}.weight"] = np.zeros((HEADS * HEAD_DIM, HIDDEN), np.float32)
    metadata = {key: value for key, value in METADATA.items() if not key.endswith("head_count_kv")}
    folder = described(write_gguf(tmp_path / "m.gguf", weights, metadata), tmp_path / "cache")
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["num_key_value_heads"] == HEADS


def test_linear_rope_scaling_is_mapped(tmp_path: Path) -> None:
    metadata = {**METADATA, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = described(
        write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()), metadata), tmp_path / "cache"
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 4.0},
            "rope.scaling is {'type': 'dynamic', 'factor': 4.0}",
        ),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"llama.attention.head_count_kv is \[2, 1\]"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.block_count": 2.0}, r"metadata has num_hidden_layers=2\.0; it must be"),
        ({"llama.x": [[1]]}, "truncated or damaged: a list of 1 entries of type 9"),
        ({"split.count": "many"}, "is one of many parts"),
        (
            {"tokenizer.chat_template": "x", "tokenizer.ggml.eot_token_id": "2"},
            "contains an invalid value",
        ),
        (
            {"llama.attention.head_count_kv": 4},
            r"attn_k\.weight has 32 rows, expected 64 by its metadata",
        ),
    ],
)
def test_unmapped_metadata_is_rejected(
    tmp_path: Path, changes: Mapping[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()), {**METADATA, **changes})
    with pytest.raises(ModelLoadError, match=message):
        described(path, tmp_path / "cache")


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    metadata = {key: value for key, value in METADATA.items() if key != "llama.block_count"}
    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()), metadata)
    with pytest.raises(ModelLoadError, match=r"llama\.block_count is None"):
        described(path, tmp_path / "cache")


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()), architecture="mamba")
    with pytest.raises(
        ModelLoadError, match=r"architecture 'mamba'; supported: .*gemma3, .*llama, .*qwen2, "
    ):
        described(path, tmp_path / "cache")


@pytest.mark.parametrize(
    "name", ["rope_factors.weight", "blk.0.attn_q_norm.weight", f"blk.{LAYERS}.ffn_up.weight"]
)
def test_unknown_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = {**stored_weights(hf_weights()), name: np.ones(8, np.float32)}
    with pytest.raises(ModelLoadError, match=f"tensor {name} is not supported"):
        described(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "cache")


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_up.weight"])
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = stored_weights(hf_weights())
    del tensors[name]
    with pytest.raises(ModelLoadError, match=f"no tensor {name}"):
        described(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "cache")


def test_unsupported_tensor_type_is_rejected(tmp_path: Path) -> None:
    tensors = stored_weights(hf_weights()) | {"output_norm.weight": np.ones(HIDDEN, np.int32)}
    with pytest.raises(ModelLoadError, match=r"tensor output_norm\.weight has an unsupported type"):
        described(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "cache")


@pytest.mark.parametrize("content", [b"", b"GGU", b"not a GGUF file at all", b"PK\x03\x04 0000"])
def test_non_gguf_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        described(path, tmp_path / "cache")


def test_missing_file_and_unknown_version_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot read the GGUF file"):
        described(tmp_path / "absent.gguf", tmp_path / "cache")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little"))
    with pytest.raises(ModelLoadError, match="has GGUF version 9"):
        described(path, tmp_path / "cache")


def test_truncated_file_is_rejected_and_leaves_no_folder(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights())).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (8, 12, 23, 24, 60, 300, 700, 1200, 2000, len(whole) // 2, len(whole) - 4000):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match="truncated or damaged"):
            described(path, tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


def test_second_call_reuses_the_folder(tmp_path: Path) -> None:
    calls: list[Path] = []

    def counting_writer(path: Path, folder: Path) -> None:
        calls.append(path)

    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()))
    folders = {
        describe_gguf(path, tmp_path / "cache", tokenizer_writer=counting_writer) for _ in range(3)
    }
    assert len(folders) == 1
    assert calls == [path]


def test_folder_records_the_path_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()))
    monkeypatch.chdir(tmp_path)
    folder = described(Path("m.gguf"), tmp_path / "cache")
    assert described(path, tmp_path / "cache") == folder
    assert described_by(folder) == path
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(tensors_in(folder)) == len(hf_weights())
    assert described_by(tmp_path) is None
    moved = path.rename(tmp_path / "n.gguf")
    with pytest.raises(ModelLoadError, match=r"cannot read the GGUF file .*m\.gguf"):
        tensors_in(folder)
    assert described_by(described(moved, tmp_path / "cache")) == moved


def test_other_contents_get_another_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()))
    first = described(path, tmp_path / "cache")
    other = write_gguf(tmp_path / "o.gguf", stored_weights(hf_weights(tied=False)))
    other.replace(path)
    assert described(path, tmp_path / "cache") != first


def test_other_weights_under_the_same_header_get_another_folder(tmp_path: Path) -> None:
    """Per-folder data, such as keys and values on disk, belongs to one file."""
    weights = hf_weights()
    path = write_gguf(tmp_path / "m.gguf", stored_weights(weights))
    first = described(path, tmp_path / "cache")
    other = {name: 2 * values for name, values in weights.items()}
    write_gguf(tmp_path / "o.gguf", stored_weights(other)).replace(path)
    assert described(path, tmp_path / "cache") != first
    norm = tensors_in(described(path, tmp_path / "cache"))["model.norm.weight"]
    np.testing.assert_array_equal(norm, other["output_norm.weight"])


def test_leftover_of_a_killed_process_is_not_used(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()))
    expected = described(path, tmp_path / "elsewhere")
    root = tmp_path / "cache"
    leftover = root / f".{expected.name}-abc.unfinished"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_bytes(b"half")
    folder = described(path, root)
    assert (folder / "config.json").read_bytes() == (expected / "config.json").read_bytes()
    assert leftover.is_dir()  # another process may still be writing it


def test_failed_description_leaves_no_folder(tmp_path: Path) -> None:
    def failing_writer(path: Path, folder: Path) -> None:
        raise OSError("disk full")

    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()))
    with pytest.raises(ModelLoadError, match="disk full"):
        describe_gguf(path, tmp_path / "cache", tokenizer_writer=failing_writer)
    assert files_in(tmp_path / "cache") == []


def test_concurrent_descriptions_both_succeed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", stored_weights(hf_weights()))
    both_are_writing = threading.Barrier(2, timeout=30)
    folders: list[Path] = []

    def writer(path: Path, folder: Path) -> None:
        both_are_writing.wait()
        no_tokenizer(path, folder)

    def run() -> None:
        folders.append(describe_gguf(path, tmp_path / "cache", tokenizer_writer=writer))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2
    assert folders[0] == folders[1]
    assert list((tmp_path / "cache").iterdir()) == [folders[0]]
    assert {file.name for file in folders[0].iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.gguf",
        "tokenizer.json",
    }
