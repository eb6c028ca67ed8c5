"""Engines on quantized checkpoints equal engines on the dequantized values."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.rl import PolicyModel
from tests.checkpoints.quantisers import write_quantised
from tests.models.tiny import llama_config, llama_weights, write_model
from tests.ranks.rank_threads import ThreadLauncher

PROMPTS = [list(range(3, 40)), [5, 6, 7]]


def build(folder: Path, launcher: ThreadLauncher | None = None, **options: Any) -> InferenceEngine:
    settled = {"num_threads": 1, "kv_cache_memory": 2**20, "seed": 0, "dtype": "bfloat16"}
    return InferenceEngine(EngineConfig(str(folder), **(settled | options)), launcher=launcher)


def samples(engine: InferenceEngine) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(max_tokens=12, temperature=1.0)
    samples = engine.generate(PROMPTS, params)
    return [(list(each.completion_tokens), list(each.logprobs)) for each in samples]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Write a quantized model and its dequantized copy."""
    config = llama_config()
    reference = write_quantised(tmp_path / "coded", "fp8-blocks", config, llama_weights(config))
    return tmp_path / "coded", write_model(tmp_path / "plain", config, reference)


def test_startup_log_names_the_quantization(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="nano_inference"), build(folders[0], dtype="auto"):
        (line,) = [text for text in caplog.messages if "quantized with" in text]
    assert line == (
        f"{folders[0]}: quantized with fp8 (8 bits, a scale for 24 x 40), dequantized to bfloat16; "
        "activations are not quantized to fp8, dynamic; its weights take 0.2 MiB"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="nano_inference"), build(folders[1]):
        assert "quantised" not in caplog.text


@pytest.mark.thorough(cases=["2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_dequantized_engine_equals_the_plain_model(folders: tuple[Path, Path], ranks: int) -> None:
    results = []
    for folder in folders:
        launcher = ThreadLauncher() if ranks > 1 else None
        with build(folder, launcher, tensor_parallel=ranks) as engine:
            fingerprint, checksum = engine.numerics.fingerprint, engine.weights_checksum()
            results.append((fingerprint, checksum, samples(engine)))
    assert results[0] == results[1]


def test_update_after_a_quantized_start_uses_plain_weights(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    weights = llama_weights(llama_config(), seed=1)
    with build(folders[0]) as engine, build(folders[1]) as plain:
        for target in (engine, plain):
            target.update_weights(weights)
        assert engine.weights_checksum() == plain.weights_checksum()
        assert samples(engine) == samples(plain)
        engine.update_weights(folders[1])
        assert engine.get_weight_version() == 2


def test_quantized_reference_scores_a_plain_policy(folders: tuple[Path, Path]) -> None:
    logprobs: list[list[float]] = []
    for reference in folders:
        with build(folders[1], ref_model_path=str(reference)) as engine:
            params = SamplingParams(max_tokens=5, temperature=1.0)
            logprobs += [
                list(each.ref_logprobs or ()) for each in engine.generate([PROMPTS[0]], params)
            ]
    assert logprobs[0] == logprobs[1]
    assert len(logprobs[0]) == 5


def test_trainer_parameters_start_exact_and_are_saved_as_floats(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with build(folders[0]) as engine:
        model = PolicyModel(engine)
        up = dict(model.named_parameters())[name]
        assert up.dtype == torch.float32
        assert not torch.equal(up, up.bfloat16().float())
        checksum = engine.weights_checksum()
        model.save_pretrained(tmp_path / "saved")
    with build(tmp_path / "saved") as engine:
        assert engine.spec.quantisation is None
        assert engine.weights_checksum() == checksum
