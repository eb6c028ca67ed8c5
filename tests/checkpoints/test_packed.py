"""Engines that map packed weights compute the bits of engines that read the checkpoint."""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nano_inference import EngineConfig, InferenceEngine, ModelLoadError, SamplingParams
from nano_inference.checkpoints import packed
from tests.models.tiny import tiny_model
from tests.ops.compiler import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
PROMPTS = [[5, 6, 7, 8, 9], [3, 4]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pack small models too, in a cache of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packed, "LEAST", 0)
    return tmp_path / "cache/nano-inference/packed"


def engine(folder: Path, **options: Any) -> InferenceEngine:
    return InferenceEngine(EngineConfig(str(folder), kv_cache_memory=2**24, **options))


def samples(running: InferenceEngine) -> list[tuple[Sequence[int], Sequence[float]]]:
    params = SamplingParams(max_tokens=8, seed=1)
    return [
        (sample.completion_tokens, sample.logprobs) for sample in running.generate(PROMPTS, params)
    ]


def results(folder: Path, **options: Any) -> list[tuple[Sequence[int], Sequence[float]]]:
    with engine(folder, **options) as running:
        return samples(running)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4", "dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe", "deepseek-v3"])
def test_mapped_weights_compute_the_same_bits(
    cache: Path, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    folder = tiny_model(tmp_path / family, family)
    first = results(folder, **options)
    (file,) = cache.glob("*.packed")
    written = file.stat().st_mtime_ns
    assert results(folder, **options) == first
    assert [each.stat().st_mtime_ns for each in cache.glob("*.packed")] == [written]


def test_mapped_weights_are_read_without_the_checkpoint(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(tmp_path / "llama", "llama")
    first = results(folder)
    monkeypatch.setattr(packed, "load_params", lambda *_: pytest.fail("the checkpoint was read"))
    assert results(folder) == first


@pytest.mark.skipif(sys.platform != "linux", reason="the list of mappings is Linux's")
@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_mapped_file_is_released_at_shutdown(cache: Path, tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path / family, family)
    gc.disable()  # nothing may wait for a collection of cycles
    try:
        for _ in range(2):
            results(folder, dtype="bfloat16")
    finally:
        gc.enable()
    (file,) = cache.glob("*.packed")
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_updates_of_mapped_weights_stay_private(cache: Path, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "llama", "llama")
    first = results(folder)
    with engine(folder) as running, engine(folder) as other:
        name, value = "model.embed_tokens.weight", np.ones((300, 64), dtype=np.float32)
        running.update_weights({name: value})
        assert samples(running) != first
        assert samples(other) == first
    assert results(folder) == first


def test_checkpoint_replaces_damaged_packed_weights(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model(tmp_path / "llama", "llama")
    first = results(folder)
    (file,) = cache.glob("*.packed")
    file.chmod(0o644)
    with file.open("r+b") as damaged:
        damaged.seek(-100, 2)
        damaged.write(b"\xff" * 4)
    assert results(folder) == first
    assert "its checksum is wrong" in caplog.text


def test_changed_checkpoint_is_packed_again(cache: Path, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "llama", "llama")
    results(folder)
    other = tiny_model(tmp_path / "other", "llama", seed=5)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    assert results(folder) == results(other)


def test_cache_that_cannot_be_written_costs_one_line(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model(tmp_path / "llama", "llama")
    cache.parent.mkdir(parents=True)
    cache.write_text("a file, not a folder")
    first = results(folder)
    assert caplog.text.count("packs them again") == 1
    cache.unlink()
    assert results(folder) == first


def test_checkpoint_without_a_hash_is_reported_by_its_reader(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("it changed while it was read")

    folder = tiny_model(tmp_path / "llama", "llama")
    first = results(folder)
    monkeypatch.setattr(packed, "packed_file", refuse)
    assert results(folder) == first
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="cannot be read as safetensors"):
        engine(folder)
