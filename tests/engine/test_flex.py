"""An engine with `attention="flex"` matches the reference: equal greedy tokens, logprobs within
1e-5.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import (
    ConfigError,
    EngineConfig,
    InferenceEngine,
    SamplingParams,
    TrainingSample,
)
from tests.models.tiny import tiny_model
from tests.ops.compiler import NEEDS_COMPILER

# torch's compiler uses functions that torch itself deprecates.
pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"), NEEDS_COMPILER]


def config(model: Path, attention: str, **options: Any) -> EngineConfig:
    # 128 blocks of 16 or 256 of 8: most tests run on the kernels that tests/ops/test_flex.py
    # compiles at these sizes.
    return EngineConfig(
        str(model),
        attention=attention,
        device="cpu",
        dtype="float32",
        max_batch_size=8,
        max_model_len=256,
        **options,
    )


def prompts(rng: random.Random, sizes: Sequence[int]) -> list[list[int]]:
    return [[rng.randrange(3, 300) for _ in range(size)] for size in sizes]


def assert_same(got: Sequence[TrainingSample], expected: Sequence[TrainingSample]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.completion_tokens == other.completion_tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def compare(model: Path, **options: Any) -> None:
    """Compare prompts of many lengths, then longer ones that hit whole blocks, in chunks of 24."""
    if options["block_size"] % 16 == 8 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        with pytest.raises(
            ConfigError, match=r"computes wrong values here with block_size=8 .* multiple of 16"
        ):
            InferenceEngine(config(model, "flex", **options))
        return
    rng = random.Random(0)
    first = prompts(rng, [1, 5, 16, 40, 60])
    again = [
        prompt + extra for prompt, extra in zip(first, prompts(rng, [3, 30, 1, 9, 20]), strict=True)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    samples: dict[str, list[TrainingSample]] = {}
    for attention in ("reference", "flex"):
        with InferenceEngine(
            config(model, attention, max_chunk_tokens=24, seed=0, **options)
        ) as engine:
            samples[attention] = [*engine.generate(first, params), *engine.generate(again, params)]
            samples[attention] += engine.generate(again[:2], params, num_samples_per_prompt=2)
            assert engine.numerics.schedule_invariant == (attention == "reference")
            assert ("+flex" in engine.numerics.fingerprint) == (attention == "flex")
    assert any(sample.cached_tokens for sample in samples["flex"])
    assert samples["flex"][0].numerics.startswith("reference+flex-")
    assert_same(samples["flex"], samples["reference"])


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("block_size", [16, 8])
def test_flex_agrees_with_the_reference(tmp_path: Path, family: str, block_size: int) -> None:
    # A Gemma model with the heads and scale of the others.
    changes = {"num_key_value_heads": 2, "query_pre_attn_scalar": 16} if family == "gemma3" else {}
    compare(tiny_model(tmp_path, family, **changes), block_size=block_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "block_size"),
    [("llama", 5), ("gemma3", 8), ("gemma3", 16), ("qwen3", 16), ("phi3", 16), ("granite", 16)],
)
def test_flex_agrees_in_other_families(tmp_path: Path, family: str, block_size: int) -> None:
    compare(tiny_model(tmp_path, family), block_size=block_size)


@pytest.mark.slow
def test_flex_agrees_with_little_memory(tmp_path: Path) -> None:
    """Covers preemption and reused blocks."""
    model = tiny_model(tmp_path, "llama")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asked = prompts(random.Random(1), [30, 50, 20, 61, 7])
    results: list[list[TrainingSample]] = []
    for attention in ("reference", "flex"):
        options = {"kv_cache_memory": 12 * 16 * 2 * 2 * 2 * 16 * 4}  # 12 blocks
        with InferenceEngine(config(model, attention, **options)) as engine:
            results.append(engine.generate(asked, params))
    assert_same(results[1], results[0])


@pytest.mark.thorough
def test_flex_scores_a_frozen_reference_model(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "llama")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with InferenceEngine(config(model, "flex", ref_model_path=str(model))) as engine:
        (sample,) = engine.generate([[5, 6, 7]], params)
    assert sample.ref_logprobs == pytest.approx(sample.logprobs, abs=1e-5)
