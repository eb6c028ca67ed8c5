"""Default dtype and memory of an engine."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.arrays import has_dtype
from nano_inference.checkpoints import loading
from nano_inference.checkpoints.loading import load_spec
from nano_inference.device import backends
from nano_inference.device.backends import choose_dtype
from tests.models.tiny import tiny_llama

CPU = torch.device("cpu")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Simulate a machine without bfloat16 instructions that has matching kernels."""
    monkeypatch.setattr(loading, "cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backends._tell_once.cache_clear()
    return lambda name: monkeypatch.setattr(backends, "available_instruction_set", lambda: name)


@pytest.mark.parametrize(
    ("build", "options", "dtype"),
    [
        ("avx2", {}, torch.bfloat16),
        ("avx2+tiles", {}, torch.bfloat16),
        ("avx512_vnni", {"attention": "cpu"}, torch.bfloat16),
        ("avx2", {"dtype": "float32"}, torch.float32),
        ("avx2", {"backend": "reference"}, torch.float32),
        ("avx2", {"attention": "flex"}, torch.float32),
        ("portable", {}, torch.float32),
        ("neon", {}, torch.float32),
        (None, {}, torch.float32),
        (None, {"quantization": "int8"}, torch.bfloat16),
    ],
)
def test_choose_dtype_of_a_gguf_file_is_bfloat16_if_it_is_faster(
    tmp_path: Path, on: Any, build: str | None, options: dict[str, Any], dtype: torch.dtype
) -> None:
    on(build)
    spec = replace(load_spec(tiny_llama(tmp_path)), quantized_source=True)
    assert choose_dtype(EngineConfig("m", **options), spec, CPU) == dtype


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_choose_dtype_keeps_the_dtype_of_a_checkpoint(
    tmp_path: Path, on: Any, stored: torch.dtype
) -> None:
    on("avx2")
    spec = load_spec(tiny_llama(tmp_path, dtype=stored))
    assert choose_dtype(EngineConfig("m"), spec, CPU) == stored


@pytest.mark.parametrize("build", ["avx2", "portable", "neon"])
def test_choose_dtype_rounds_float16_if_kernels_run(
    tmp_path: Path, on: Any, caplog: pytest.LogCaptureFixture, build: str
) -> None:
    """The reference backend computes float16, but 100 times slower."""
    on(build)
    spec = load_spec(tiny_llama(tmp_path, dtype=torch.float16))
    with caplog.at_level(logging.INFO, "nano_inference"):
        for _ in range(2):
            assert choose_dtype(EngineConfig("m"), spec, CPU) == torch.bfloat16
    (line,) = (record.getMessage() for record in caplog.records)
    assert "rounding weights to bfloat16. dtype='float32' keeps full precision" in line
    for options in ({"dtype": "float16"}, {"backend": "reference"}):
        assert choose_dtype(EngineConfig("m", **options), spec, CPU) == torch.float16


def test_choose_dtype_of_float16_stays_float16_without_kernels(tmp_path: Path, on: Any) -> None:
    on(None)
    spec = load_spec(tiny_llama(tmp_path, dtype=torch.float16))
    assert choose_dtype(EngineConfig("m"), spec, CPU) == torch.float16


def test_float16_engine_logs_why_it_is_slow_and_the_fix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backends._warn_once.cache_clear()
    folder = str(tiny_llama(tmp_path))
    with InferenceEngine(EngineConfig(folder, dtype="float16", kv_cache_memory=2**20)):
        pass
    (line,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert "many times slower than the CPU kernels" in line
    assert "the CPU kernels do not support float16; use dtype='bfloat16' or 'float32'." in line


@pytest.mark.parametrize("quantization", ["int8", "int8-32", "int4"])
def test_quantized_engine_caches_two_byte_keys_and_values(
    tmp_path: Path, quantization: Any
) -> None:
    folder = str(tiny_llama(tmp_path))
    config = EngineConfig(folder, quantization=quantization, kv_cache_memory=2**20)
    with InferenceEngine(config) as engine:
        assert has_dtype(engine.runner.storage.keys, torch.bfloat16)
