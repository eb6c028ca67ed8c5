"""`quantization="auto"`: a CPU computes a `.gguf` file in its blocks unless a feature needs plain
weights.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import (
    ConfigError,
    EngineConfig,
    InferenceEngine,
    SamplingParams,
)
from nano_inference.arrays import HOST, host
from nano_inference.checkpoints.embedded import find_embedded
from nano_inference.checkpoints.folders import describe_model, load_spec
from nano_inference.config import DType, with_plain_weights
from nano_inference.device import backends, quantization
from nano_inference.device.backends import bf16_gains, choose_dtype
from nano_inference.device.quantization import blocks_bytes, settle_quantization, told_weights
from nano_inference.models.parameters.storage import formats_of
from nano_inference.rl import LoraPolicy, PolicyModel
from tests.checkpoints.hf_to_gguf import hf_to_gguf
from tests.models.strong import strong_model
from tests.models.tiny_gguf import gguf
from tests.ops.compiler import NEEDS_COMPILER

CPU = torch.device("cpu")
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with `.gguf` files next to it, with and without blocks."""
    made = tmp_path_factory.mktemp("models")
    strong_model(made / "hf", "LlamaForCausalLM", **CONFIG)
    for name in ("Q4_1", "F16"):
        kind = gguf.GGMLQuantizationType[name]
        hf_to_gguf(made / "hf", made / f"{name}.gguf", "llama", matrices=kind)
    return made


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "nano_inference.checkpoints.gguf.file.cache_folder", lambda name: tmp_path / name
    )


def config(model: Path, **options: Any) -> EngineConfig:
    defaults = {"kv_cache_memory": 2**20, "max_model_len": 64, "num_threads": 1, "device": "cpu"}
    return EngineConfig(str(model), **{**defaults, **options})


@NEEDS_COMPILER
def test_gguf_engine_computes_with_its_blocks(folder: Path) -> None:
    results = {}
    for asked in ("auto", "file", "none"):
        with InferenceEngine(config(folder / "Q4_1.gguf", quantization=asked)) as engine:
            assert engine.config.quantization == (None if asked == "none" else "file")
            assert bool(formats_of(engine.model.params)) == (asked != "none")
            results[asked] = engine.generate([5, 6, 7], GREEDY)[0]
    assert results["auto"] == results["file"]
    assert results["auto"].numerics != results["none"].numerics


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", ["auto", "fast"])
def test_auto_chooses_blocks_for_models_that_packages_carry(dtype: DType) -> None:
    asked = EngineConfig("SmolLM2-135M", device="cpu", dtype=dtype)
    assert settle_quantization(asked, CPU).quantization == "file"
    file = str(find_embedded("smollm2-135m"))
    assert settle_quantization(replace(asked, model_path=file), CPU).quantization == "file"


@NEEDS_COMPILER
def test_fast_rounds_large_float32_checkpoints_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(describe_model("smollm2-135m"))
    wide = replace(spec, checkpoint_dtype="float32", quantized_source=False)
    small = replace(wide, num_layers=1, vocab_size=1000)
    for dtype in ("auto", "fast"):
        config = EngineConfig("m", device="cpu", dtype=dtype)
        rounded = dtype == "fast" and bf16_gains(config, HOST)
        assert choose_dtype(config, wide, HOST) == (host.bfloat16 if rounded else host.float32)
        assert choose_dtype(config, small, HOST) == host.float32
    monkeypatch.setattr(backends, "bf16_gains", lambda *_: False)
    assert choose_dtype(EngineConfig("m", dtype="fast"), wide, HOST) == host.float32


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"backend": "reference"},
        {"attention": "reference"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"ref_model_path": "Q4_1.gguf"},
        {"draft_model": "self", "draft_quantization": "int8"},
        {"draft_model": "hf"},
    ],
)
def test_auto_is_plain_if_another_option_needs_it(folder: Path, options: dict[str, Any]) -> None:
    for name in ("ref_model_path", "draft_model"):
        if options.get(name, "self") != "self":
            options = {**options, name: str(folder / options[name])}
    asked = config(folder / "Q4_1.gguf", **options)
    assert settle_quantization(asked, CPU).quantization is None
    free = config(folder / "Q4_1.gguf", draft_model="self", draft_layers=1, max_loras=1)
    assert settle_quantization(free, CPU).quantization == "file"
    assert settle_quantization(free, torch.device("cuda")).quantization is None


@pytest.mark.parametrize("name", ["hf", "F16.gguf"])
def test_auto_is_plain_for_weights_without_blocks(folder: Path, name: str) -> None:
    assert blocks_bytes(str(folder / name)) == 0
    assert settle_quantization(config(folder / name), CPU).quantization is None


def test_auto_is_plain_without_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(folder / "Q4_1.gguf")
    monkeypatch.setattr(quantization, "available_instruction_set", lambda: None)
    assert settle_quantization(asked, CPU).quantization is None
    monkeypatch.setattr(quantization, "available_instruction_set", lambda: "avx2")
    assert settle_quantization(asked, CPU).quantization == "file"
    monkeypatch.setattr(quantization, "no_cpu_kernels_for", lambda *_: "head_dim=24 has none.")
    assert settle_quantization(asked, CPU).quantization is None


def test_blocks_bytes_equal_the_bytes_held(folder: Path) -> None:
    with InferenceEngine(config(folder / "Q4_1.gguf")) as engine:
        held = engine.memory_budget.weights
    assert 0.7 * held < blocks_bytes(str(folder / "Q4_1.gguf")) <= held


@pytest.mark.parametrize(
    ("name", "dtype", "options", "line"),
    [
        ("Q4_1.gguf", "float32", {}, "float32, 512.0 MiB; --quantization file: 0.1 MiB, about 4x faster; answers may differ slightly"),
        ("Q4_1.gguf", "bfloat16", {}, "bfloat16, 512.0 MiB; --quantization file: 0.1 MiB, about 2x faster; answers may differ slightly"),
        ("Q4_1.gguf", "bfloat16", {"quantization": "file"}, "bfloat16, weights as codes (file), 512.0 MiB"),
        ("Q4_1.gguf", "float32", {"backend": "reference"}, "float32, 512.0 MiB"),
        ("hf", "float32", {}, "float32, 512.0 MiB; --dtype bfloat16: 256.0 MiB, about 2x faster; answers may differ slightly"),
        ("hf", "bfloat16", {}, "bfloat16, 512.0 MiB"),
    ],
)  # fmt: skip
def test_told_weights_names_a_faster_setting_if_one_exists(
    folder: Path,
    name: str,
    dtype: str,
    options: dict[str, Any],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (quantization, backends):
        monkeypatch.setattr(module, "available_instruction_set", lambda: "avx2")
    asked = config(folder / name, **options)
    settled = asked if asked.codes else replace(asked, quantization=None)
    log_line = told_weights(settled, asked, getattr(torch, dtype), 2**29, CPU)
    assert log_line == line
    log_line = told_weights(settled, asked, getattr(torch, dtype), 2**20, CPU)
    assert ";" not in log_line, "too small to gain"


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("Q4_1.gguf", {"quantization": "none", "dtype": "bfloat16"}, "bfloat16, 512.0 MiB"),
        ("Q4_1.gguf", {"quantization": None, "dtype": "float32"}, "float32, 512.0 MiB"),
        ("hf", {"dtype": "float32"}, "float32, 512.0 MiB"),
    ],
)
def test_told_weights_names_no_setting_that_was_ruled_out(
    folder: Path, name: str, options: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (quantization, backends):
        monkeypatch.setattr(module, "available_instruction_set", lambda: "avx2")
    asked = config(folder / name, **options)
    settled = replace(asked, quantization=None)
    assert told_weights(settled, asked, getattr(torch, asked.dtype), 2**29, CPU) == line


@pytest.mark.parametrize("plain", [False, True])
def test_engine_logs_no_setting_that_was_ruled_out(
    folder: Path, plain: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quantization, "LEAST", 0)
    monkeypatch.setattr(quantization, "available_instruction_set", lambda: "avx2")
    monkeypatch.setattr(quantization, "wants_cpu_kernels", lambda _: True)
    asked = config(folder / "Q4_1.gguf", dtype="bfloat16", backend="reference")
    asked = with_plain_weights(asked) if plain else asked  # like --rl
    with caplog.at_level("INFO", "nano_inference"), InferenceEngine(asked):
        assert ("--quantization file" in caplog.text) != plain


@NEEDS_COMPILER
def test_policy_model_rejects_implicit_blocks(folder: Path) -> None:
    with InferenceEngine(config(folder / "Q4_1.gguf")) as engine:
        with pytest.raises(ConfigError, match=r"PolicyModel needs plain weights.*=None"):
            PolicyModel(engine)
        assert engine.generate([5, 6], GREEDY)[0].finish_reason == "length"


@NEEDS_COMPILER
def test_lora_policy_trains_on_blocks(folder: Path) -> None:
    """The adapted weights never change, so nothing is rounded."""
    with InferenceEngine(config(folder / "Q4_1.gguf", max_loras=1)) as engine:
        policy = LoraPolicy(engine)
        policy.publish()
        (sample,) = engine.generate([5, 6, 7], replace(GREEDY, adapter="trainer"))
        (ours,) = policy.logprobs([(5, 6, 7, *sample.completion_tokens)], from_position=3)
        assert tuple(ours.tolist()) == sample.logprobs
        ours.sum().backward()


@NEEDS_COMPILER
def test_implicit_blocks_warn_once_that_updates_are_rounded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    norm = {"model.norm.weight": torch.ones(64)}
    for asked, count in (("auto", 1), ("file", 0)):
        caplog.clear()
        with InferenceEngine(config(folder / "Q4_1.gguf", quantization=asked)) as engine:
            for _ in range(2):
                engine.update_weights(norm, blocking=True)
            assert engine.get_weight_version() == 2
        assert caplog.text.count("Set quantization=None to serve them unrounded") == count


@NEEDS_COMPILER
def test_named_blocks_accept_updates(folder: Path) -> None:
    with InferenceEngine(config(folder / "Q4_1.gguf", quantization="file")) as engine:
        PolicyModel(engine).publish()
        assert engine.get_weight_version() == 1


@NEEDS_COMPILER
@pytest.mark.parametrize("policy", [PolicyModel, LoraPolicy])
def test_trainer_builds_an_engine_of_plain_weights(folder: Path, policy: Any) -> None:
    model = policy(config(folder / "Q4_1.gguf", max_loras=1))
    with model.engine as engine:
        assert engine.config.quantization is None
        assert not formats_of(engine.model.params)


def test_plain_weights_context_keeps_named_codes() -> None:
    asked = EngineConfig("m")
    assert with_plain_weights(asked).quantization is None
    for codes in ("int8", "file", None):
        asked = replace(asked, quantization=codes)
        assert with_plain_weights(asked) == asked
    assert EngineConfig("m", quantization="none") == EngineConfig("m", quantization=None)


def test_codes_are_none_until_auto_is_settled() -> None:
    assert EngineConfig("m").codes is None
    assert EngineConfig("m", quantization="none").codes is None
    assert EngineConfig("m", quantization="file").codes == "file"
