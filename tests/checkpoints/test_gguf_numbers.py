"""The numbers that an engine computes with after it loaded a GGUF file, and the data that stays on
disk.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.checkpoints.folders import load_spec, resolve_model
from nano_inference.checkpoints.gguf import weights as gguf_weights
from nano_inference.checkpoints.gguf.codes import KINDS, numbers_of
from nano_inference.checkpoints.gguf.header import LAYOUTS, read_header
from nano_inference.checkpoints.loading import load_params, read_tensors
from nano_inference.errors import ModelLoadError
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.models.spec.read import CONVERTED
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.rl.checkpoint import checkpoint_of
from nano_inference.system.cache_folder import cache_folder
from tests.models.tiny_gguf import (
    HEADS,
    KV_HEADS,
    LAYERS,
    METADATA,
    VOCAB,
    gguf,
    stored_weights,
    write_gguf,
)

HIDDEN = 256  # one block of the largest types
CPU = torch.device("cpu")
WIDE: Mapping[str, Any] = {
    **METADATA,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": HIDDEN,
    "llama.rope.dimension_count": HIDDEN // HEADS,
}
# Bytes of a block that hold a float16, and a value for it that gives weights of normal size.
HALVES: Mapping[str, Mapping[int, float]] = {
    "Q2_K": {80: 6e-3, 82: 1e-2},
    "Q3_K": {108: 2e-3},
    "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 5e-5},
    "IQ4_NL": {0: 1.5e-3},
    "IQ4_XS": {0: 8e-5},
}
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty model cache. Compiled kernels are kept because compiling takes half a minute."""
    kernels, cache = cache_folder("kernels"), tmp_path / "cache" / "nano-inference"
    kernels.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True)
    (cache / "kernels").symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache


def weights_of(tied: bool = False) -> dict[str, np.ndarray]:
    """Return strong weights of a small Llama under GGUF's names. Each matrix scales its input by
    about 1.5.
    """
    kv = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        rows = {"attn_k": kv, "attn_v": kv}
        names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        shapes |= {f"blk.{layer}.{name}.weight": (rows.get(name, HIDDEN), HIDDEN) for name in names}
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    drawn = np.random.default_rng(3)
    return {
        name: (1 + 0.3 * drawn.standard_normal(shape)).astype(np.float32)
        if len(shape) == 1
        else (1.5 / HIDDEN**0.5 * drawn.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def blocks_of(weight: np.ndarray, name: str) -> np.ndarray:
    """Return a matrix as blocks. Types that the gguf package cannot write get random blocks."""
    kind = gguf.GGMLQuantizationType[name]
    if name in WRITTEN:
        return gguf.quantize(weight, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(weight.size)
    blocks = drawn.integers(0, 256, (len(weight), weight.shape[1] // block, size), dtype=np.uint8)
    for at, number in HALVES[name].items():
        halves = (number * drawn.normal(1, 0.2, blocks.shape[:2])).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(len(weight), -1)


def file_of(path: Path, name: str, tied: bool = False) -> Path:
    """Write a file whose matrices have this type."""
    stored = stored_weights(weights_of(tied))
    kind = gguf.GGMLQuantizationType[name]
    raw = {key: (blocks_of(each, name), kind) for key, each in stored.items() if each.ndim > 1}
    return write_gguf(path, stored, WIDE, raw=raw)


def numbers_in(path: Path) -> dict[str, np.ndarray]:
    """Return all numbers of a file in float32 under Hugging Face's names: dequantised by the gguf
    package, then reordered.
    """
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
        **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
    arrays: dict[str, np.ndarray] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        *layer, leaf = tensor.name.removesuffix(".weight").rsplit(".", 1)
        prefix = layer[0].replace("blk", "model.layers") + "." if layer else ""
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if leaf in ("attn_q", "attn_k"):
            heads = HEADS if leaf == "attn_q" else KV_HEADS
            pairs = numbers.reshape(heads, len(numbers) // heads // 2, 2, HIDDEN)
            numbers = pairs.swapaxes(1, 2).reshape(numbers.shape)
        arrays[f"{prefix}{names[leaf]}.weight"] = np.array(numbers, np.float32, order="C")
    return arrays


def oracle_of(path: Path, folder: Path) -> Path:
    """Write the model of a file as an ordinary float32 folder."""
    folder.mkdir()
    config = json.loads((resolve_model(str(path)) / "config.json").read_text())
    config.pop(CONVERTED)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    save_file(numbers_in(path), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def samples_of(model: Path, **options: Any) -> list[TrainingSample]:
    config = {"kv_cache_memory": 2**23, "dtype": "float32", "device": "cpu", **options}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=True)
    with InferenceEngine(EngineConfig(str(model), **config)) as engine:
        return engine.generate([[5, 6, 7], list(range(3, 37))], params)


def require_same(actual: list[TrainingSample], wanted: list[TrainingSample]) -> None:
    for one, other in zip(actual, wanted, strict=True):
        assert one.completion_tokens == other.completion_tokens
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = (torch.tensor(getattr(each, name)[1:]) for each in (one, other))
            assert torch.equal(ours, theirs)
            assert ours.isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*WRITTEN, *HALVES])
def test_file_logprobs_equal_those_of_dequantised_weights(
    tmp_path: Path, name: str, dtype: str
) -> None:
    path = file_of(tmp_path / "m.gguf", name)
    oracle = oracle_of(path, tmp_path / "oracle")
    require_same(samples_of(path, dtype=dtype), samples_of(oracle, dtype=dtype))


def test_parameter_may_join_matrices_of_several_types(tmp_path: Path) -> None:
    stored = stored_weights(weights_of())
    types = {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "F16", "ffn_gate": "Q6_K"}
    types |= {"ffn_down": "MXFP4", "token_embd": "BF16", "output": "Q5_1"}
    raw = {}
    for name, stored_tensor in stored.items():
        kind = next(
            (kind for part, kind in types.items() if part in name and stored_tensor.ndim > 1), None
        )
        if kind is not None:
            raw[name] = (blocks_of(stored_tensor, kind), gguf.GGMLQuantizationType[kind])
    path = write_gguf(tmp_path / "m.gguf", stored, WIDE, raw=raw)
    oracle = oracle_of(path, tmp_path / "oracle")
    require_same(samples_of(path), samples_of(oracle))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "F16", "F32", "MXFP4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_rounded_once(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    path = file_of(tmp_path / "m.gguf", name)
    numbers = numbers_in(path)
    folder = resolve_model(str(path))
    spec = load_spec(folder)
    params = load_params(folder, spec, dtype, CPU)
    places = slots(param_table(spec))
    assert places.keys() == numbers.keys()
    for key, slot in places.items():
        values = read(params, slot)
        assert values.dtype == dtype
        assert torch.equal(values, torch.from_numpy(numbers[key]).to(dtype)), key


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "BF16", "F32"])
def test_slice_read_from_file_equals_slice_of_the_tensor(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_weights, "CHUNK", 5 * HIDDEN)
    reader = gguf_weights.GgufReader(file_of(tmp_path / "m.gguf", name))
    for key in reader.keys():  # noqa: SIM118 (not a dict)
        part, whole = reader.get_slice(key), reader.get_tensor(key)
        assert part.get_shape() == list(whole.shape)
        for rows in (slice(0, 1), slice(3, 17), slice(30, None), slice(9, 9), slice(None)):
            assert torch.equal(part[rows], whole[rows])
            for columns in (slice(0, 32), slice(7, 250), slice(64, 128), slice(5, 5)):
                if whole.dim() > 1:
                    assert torch.equal(part[rows, columns], whole[rows, columns])


def test_loaded_tensor_is_unaffected_by_file_changes(tmp_path: Path) -> None:
    """An update must not validate pages of a file that another process may still rewrite."""
    path = file_of(tmp_path / "m.gguf", "F32")
    tensors = dict(read_tensors(path))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_packed_from_the_file(tmp_path: Path, name: str, backend: str) -> None:
    path = file_of(tmp_path / "m.gguf", name)
    numbers = numbers_in(path)
    folder = resolve_model(str(path), coded=True)
    spec = load_spec(folder)
    ops = cpu_ops(1) if backend == "cpu" else reference_ops()
    params = load_params(folder, spec, torch.float32, CPU, ops.allocate, quantization="file")
    for key, slot in slots(param_table(spec)).items():
        assert torch.equal(read(params, slot), torch.from_numpy(numbers[key])), key


@pytest.mark.parametrize(
    ("name", "at"), [("Q8_0", 1), ("Q4_1", 1), ("Q4_1", 3), ("IQ4_XS", 1), ("MXFP4", 0)]
)
def test_damaged_scales_of_blocks_are_reported(tmp_path: Path, name: str, at: int) -> None:
    stored = stored_weights(weights_of())
    kind = gguf.GGMLQuantizationType[name]
    blocks = blocks_of(stored["blk.1.ffn_down.weight"], name)
    # a scale or minimum of infinity, or NaN
    blocks[7, max(at - 1, 0) : at + 1] = (0, 0x7C) if at else 255
    path = write_gguf(
        tmp_path / "m.gguf", stored, WIDE, raw={"blk.1.ffn_down.weight": (blocks, kind)}
    )
    config = EngineConfig(str(path), quantization="file", device="cpu", kv_cache_memory=2**22)
    with pytest.raises(
        ModelLoadError, match=r"blk\.1\.ffn_down\.weight of .* has scales or minima"
    ):
        InferenceEngine(config)


def test_shrinking_file_is_reported(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.gguf", "Q8_0")
    reader = gguf_weights.GgufReader(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match=r"GGUF tensor .* of .*m\.gguf cannot be read"):
        [reader.get_tensor(name) for name in reader.keys()]  # noqa: SIM118 (not a dict)


def test_weights_are_not_written_to_disk(tmp_path: Path, cache: Path) -> None:
    path = file_of(tmp_path / "m.gguf", "Q4_0")
    written = [
        samples_of(path, dtype=dtype, quantization=quantization)
        for dtype in ("float32", "bfloat16")
        for quantization in (None, "file")
    ]
    assert len(written) == 4
    cached = sorted(each for each in (cache / "gguf").rglob("*") if not each.is_dir())
    assert {each.name for each in cached} == {"config.json", "generation_config.json", "model.gguf"}
    assert all(each.readlink() == path for each in cached if each.name == "model.gguf")
    assert sum(each.stat().st_size for each in cached if not each.is_symlink()) < 2**12


def test_updates_references_and_drafts_load_from_gguf(tmp_path: Path) -> None:
    first, second = file_of(tmp_path / "a.gguf", "Q8_0"), file_of(tmp_path / "b.gguf", "Q4_0")
    wanted = samples_of(second)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=True)
    prompts = [[5, 6, 7], list(range(3, 37))]
    config = EngineConfig(
        str(first),
        ref_model_path=str(second),
        draft_model=str(second),
        kv_cache_memory=2**24,
        dtype="float32",
        device="cpu",
    )
    with InferenceEngine(config) as engine:
        for sample in engine.generate(prompts, params):
            assert sample.ref_logprobs is not None
            assert sample.ref_logprobs != sample.logprobs
        engine.update_weights(second)
        require_same(engine.generate(prompts, params), wanted)
        for sample in engine.generate(prompts, params):
            assert sample.ref_logprobs == sample.logprobs


def test_gguf_file_is_saved_as_a_checkpoint(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.gguf", "Q4_1")
    saved = checkpoint_of(str(path), tmp_path / "saved")
    require_same(samples_of(saved), samples_of(path))
    assert checkpoint_of(str(saved), tmp_path / "again") == saved
    halves = checkpoint_of(str(path), tmp_path / "halves", torch.bfloat16)
    assert {tensor.dtype for _, tensor in read_tensors(halves)} == {torch.bfloat16}


def test_layouts_equal_the_gguf_package() -> None:
    for number, layout in LAYOUTS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert layout == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    assert {each.name for each in LAYOUTS.values()} == {*KINDS, "F32", "F16", "BF16"}


@pytest.mark.parametrize("kind", [each for each in LAYOUTS.values() if each.name not in KINDS])
def test_numbers_equal_the_gguf_package(kind: Any) -> None:
    """Block types are in test_gguf_codes.py."""
    raw = np.random.default_rng(1).integers(0, 256, (7, 64 * kind.block_bytes), dtype=np.uint8)
    wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
    numbers = numbers_of(kind.name, raw, 64)
    np.testing.assert_array_equal(numbers.view(np.int32), wanted.view(np.int32))


def test_header_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.gguf", "F32")
    first = read_header(path)
    assert read_header(path) is first
    file_of(tmp_path / "n.gguf", "F16", tied=True).replace(path)
    assert "output.weight" not in read_header(path).tensors


def test_described_model_loads_without_the_gguf_package(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.gguf", "Q4_K")
    samples_of(path)
    program = (
        "import sys\n"
        "from nano_inference import EngineConfig, InferenceEngine\n"
        f"config = EngineConfig({str(path)!r}, kv_cache_memory=2**22, device='cpu')\n"
        "InferenceEngine(config).shutdown()\n"
        "assert 'gguf' not in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
