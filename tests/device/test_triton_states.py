"""Whole engines with states on the kernels in Triton's interpreter: graphs have the bits of eager
steps, also with drafts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import ConfigError, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.loading import load_spec
from nano_inference.device.backends import choose_ops
from tests.device.test_cuda_runner import bare, runner
from tests.device.test_triton_engine import checking, run
from tests.drafts.test_bits import set_drafts
from tests.invariance.scenario import same_bits
from tests.models.tiny import tiny_model
from tests.weights.weight_cases import Build

__all__ = ["checking"]
pytestmark = pytest.mark.usefixtures("checking")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 60,
    "num_hidden_layers": 2,
}
LAYERS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 16,
    },
}


def tiny(folder: Path, family: str) -> str:
    return str(tiny_model(folder, family, **SIZES, **LAYERS[family]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "batch_invariant"), [("lfm2", False), ("lfm2", True), ("qwen3_5", True)]
)
def test_graphs_of_states_equal_eager_steps(
    build: Build, tmp_path: Path, family: str, batch_invariant: bool
) -> None:
    options: dict[str, Any] = {
        "model_path": tiny(tmp_path, family),
        "lookahead": 1,
        "max_batch_size": 3,
        "max_model_len": 32,
    }
    expected = run(build(backend="reference", **options))
    replaying = build(backend="cuda", batch_invariant=batch_invariant, **options)
    samples = run(replaying)
    assert runner(replaying).num_replays >= 3
    assert runner(replaying).num_trunk_replays >= 1
    assert runner(replaying).num_eager_steps == 0
    for mine, theirs in zip(samples, expected, strict=True):
        assert mine.completion_tokens == theirs.completion_tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    if batch_invariant:
        eager = run(build(backend="cuda", batch_invariant=True, cuda_graphs=False, **options))
        assert [repr(bare(each)) for each in samples] == [repr(bare(each)) for each in eager]


@pytest.mark.thorough
@pytest.mark.parametrize("family", LAYERS)
def test_steps_of_drafts_replay_the_trunk(build: Build, tmp_path: Path, family: str) -> None:
    """A row of a draft reads the state of rows before it, which only a chunk computes in order."""
    options: dict[str, Any] = {
        "model_path": tiny(tmp_path, family),
        "backend": "cuda",
        "batch_invariant": True,
        "max_batch_size": 8,
        "max_model_len": 24,
    }
    prompt, params = [1, 2, 3, 4, 5], SamplingParams(max_tokens=13, seed=1, ignore_eos=True)
    plain = build(cuda_graphs=False, **options)
    expected = plain.generate([prompt], params, 2)
    engine = build(**options)
    set_drafts(
        engine, "changing", {(0, each.sample_index): each.completion_tokens for each in expected}
    )
    samples = engine.generate([prompt], params, 2)
    assert [each.finish_reason for each in samples] == ["length"] * 2
    assert all(map(same_bits, samples, expected))
    assert runner(engine).num_trunk_replays > 1
    assert runner(engine).num_eager_steps == 0
    assert engine.stats().tokens_computed > plain.stats().tokens_computed  # so there were drafts


@pytest.mark.parametrize(("attention", "backend"), [("cpu", "cpu"), ("triton", "cuda")])
@pytest.mark.parametrize("family", LAYERS)
def test_attention_kernels_serve_models_with_states(
    tmp_path: Path, family: str, attention: Any, backend: str
) -> None:
    folder = tiny(tmp_path, family)
    config = EngineConfig(folder, attention=attention)
    specs = {"policy": load_spec(Path(folder))}
    ops = choose_ops(config, specs, torch.float32, torch.device("cpu"))(1)
    assert ops.name == backend


def test_long_blocks_of_a_delta_rule_are_rejected(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen3_5")
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 2**24, "block_size": 64}
    with pytest.raises(ConfigError, match=r"block_size=64 has no CUDA kernels .*at most 32"):
        InferenceEngine(EngineConfig(folder, backend="cuda", **options))
