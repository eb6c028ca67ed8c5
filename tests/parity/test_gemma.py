"""Gemma 3 270M: the short form of `python -m tests.parity.run --model gemma3-270m`. Its packages
are large.
"""

import importlib.util
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.embedded import EMBEDDED_MODELS
from tests.parity.compare import (
    ROWS,
    TOLERANCE,
    agreement,
    compare_rows,
    complete,
    oracle_of,
    prompts,
)

MODEL = "gemma3-270m"
INSTALLED = all(importlib.util.find_spec(name) for name in EMBEDDED_MODELS[MODEL].packages)
COMMON: dict[str, Any] = {"device": "cpu", "max_model_len": 2048, "kv_cache_memory": 2**30}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not INSTALLED, reason="the packages of gemma3-270m are not installed: make .venv/gemma"
    ),
]


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_gemma_agrees_with_transformers(cache_type: str) -> None:
    with InferenceEngine(
        EngineConfig(model_path=MODEL, dtype="float32", cache_type=cache_type, **COMMON)  # pyright: ignore[reportArgumentType]
    ) as engine:
        token_ids = [*prompts(engine)[:4], *prompts(engine)[-2:]]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        samples, _ = complete(engine, token_ids, params, 1, preempted=False)
        assert len(samples[-1].prompt_tokens) > 2 * max(engine.spec.windows)
    actual = agreement(oracle_of(MODEL), samples)
    assert actual.tokens_equal == actual.tokens
    assert actual.largest_difference <= TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gemma_has_the_same_bits_in_other_configurations(dtype: str) -> None:
    with InferenceEngine(EngineConfig(model_path=MODEL, dtype="bfloat16", **COMMON)) as engine:
        token_ids = [prompts(engine)[0], prompts(engine)[-2]]
    for result in compare_rows(MODEL, dtype, token_ids, 6, (ROWS[1], ROWS[5]), **COMMON):
        assert result["equal"] == result["samples"], result
