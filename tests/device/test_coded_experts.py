"""Experts that a checkpoint stores in MXFP4 stay codes on the CUDA backend."""

import logging
from pathlib import Path

import pytest

from nano_inference import ConfigError, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.device import cuda_runner, graphs, trunk_graphs
from nano_inference.models.parameters.storage import form_of
from nano_inference.ranks.build import plan_engine
from tests.checkpoints.quantisers import write_quantised
from tests.device.card import Card
from tests.device.cuda_cases import CheckingQueue
from tests.models.test_quantised import gpt_oss_in_blocks
from tests.models.tiny import llama_config, llama_weights

PARAMS = SamplingParams(max_tokens=4, seed=5, ignore_eos=True)
PROMPTS = [[5, 9, 4, 33], [7] * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss")
    gpt_oss_in_blocks(folder)
    return folder


def engine_of(folder: Path, backend: str, quantization: str | None = "file") -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(
            str(folder),
            dtype="float32",
            backend=backend,  # pyright: ignore[reportArgumentType]
            quantization=quantization,  # pyright: ignore[reportArgumentType]
            batch_invariant=True,
            kv_cache_memory=2**20,
            max_batch_size=3,
            max_model_len=32,
        )
    )


@pytest.mark.thorough
def test_gpt_oss_computes_with_its_codes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of its products are rounded to 8 bits, as on the other backends. A row has the same
    bits alone and next to others.
    """
    monkeypatch.setattr(CheckingQueue, "warms_up", False)
    monkeypatch.setattr(cuda_runner, "queue_of", lambda _device: CheckingQueue())
    monkeypatch.setattr(graphs, "graph_sizes", lambda largest: (largest,))
    monkeypatch.setattr(trunk_graphs, "trunk_sizes", lambda _largest: (16,))
    with engine_of(folder / "coded", "reference") as engine:
        expected = engine.generate(PROMPTS, PARAMS, progress=False)
    with engine_of(folder / "coded", "cuda") as engine:
        forms = {name: form_of(param) for name, param in engine.model.params.items()}
        samples = engine.generate(PROMPTS, PARAMS, progress=False)
        (lone,) = engine.generate(PROMPTS[1], PARAMS, progress=False)
    kept = {name.split(".")[-1] for name, form in forms.items() if form is not None}
    assert kept == {"experts_gate_up", "experts_down"}
    for mine, theirs in zip(samples, expected, strict=True):
        assert mine.completion_tokens == theirs.completion_tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-2)
    assert lone.logprobs == samples[1].logprobs


def test_plan_counts_experts_as_codes(folder: Path) -> None:
    """A card that holds the codes, but not the numbers, is large enough."""
    plain, coded = (
        plan_engine(EngineConfig(str(folder / name), backend="cuda", quantization=quantization))
        for name, quantization in (("plain", None), ("coded", "file"))
    )
    assert coded.memory_budget.weights < 0.7 * plain.memory_budget.weights
    card = Card(total=coded.memory_budget.weights + 2**22)
    config = EngineConfig(str(folder / "coded"), backend="cuda", quantization="file")
    assert plan_engine(config, card).memory_budget.weights == coded.memory_budget.weights


def test_other_codes_have_no_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = llama_config(hidden=64, inner=96, layers=1)
    write_quantised(tmp_path, "compressed-int4", config, llama_weights(config))
    with pytest.raises(ConfigError, match=r"codes other than experts in MXFP4 \(.*omit quant"):
        engine_of(tmp_path, "cuda")
    with caplog.at_level(logging.WARNING), engine_of(tmp_path, "reference") as engine:
        engine.generate(PROMPTS, PARAMS, progress=False)
