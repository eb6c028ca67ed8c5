"""`nano-inference info` against the engine that it foretells."""

import json
from pathlib import Path

import pytest

from nano_inference import InferenceEngine
from nano_inference.config import EngineConfig
from tests.cli.running import run
from tests.models.tiny import tiny_model


def test_info_as_json_agrees_with_an_engine(folders: dict[str, str]) -> None:
    result = run("info", folders["chat"], "--json", "--kv-cache-memory", "8MiB", "--max-model-len", "100")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    config = EngineConfig(model_path=folders["chat"], kv_cache_memory=2**23, max_model_len=100)
    with InferenceEngine(config) as engine:
        assert found["numerics"]["fingerprint"] == engine.numerics.fingerprint
        assert found["memory"]["num_blocks"] == engine.memory_budget.num_blocks
        assert found["memory"]["num_tokens"] == engine.memory_budget.num_tokens
        assert found["num_parameters"] == sum(tensor.numel() for tensor in engine.model.params.values())
        assert found["architecture"]["num_layers"] == engine.spec.num_layers
    assert found["tokenizer"]["has_chat_template"]


def test_info_reads_no_weights(folders: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(folders["bare"]) / "config.json").read_text())
    result = run("info", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert "none: prompts must be token ids" in result.stdout


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "phi3", "olmo2", "granite"])
def test_info_of_every_kind(tmp_path: Path, family: str) -> None:
    result = run("info", str(tiny_model(tmp_path, family)), "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stderr
    assert "cpu-" in result.stdout
    assert ("layers see the last" in result.stdout) == (family in ("gemma3", "phi3"))
