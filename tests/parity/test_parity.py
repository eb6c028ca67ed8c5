"""The short form of `python -m tests.parity.run`, and the same for tiny models with every rope
scaling.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.config import Backend, CacheType
from tests.models.tiny import FAMILIES, Rope, tiny_llama, tiny_model
from tests.parity.compare import (
    MODEL,
    ROWS,
    TOLERANCE,
    agreement,
    compare_rows,
    complete,
    prompts,
    smollm2_oracle,
)

COMMON: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "kv_cache_memory": 2**29}
TINY: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 2**24}


def test_rows_cover_every_pair() -> None:
    columns = list(zip(*(vars(row).values() for row in ROWS), strict=True))
    assert len(ROWS) <= 12
    for one, other in itertools.combinations(columns, 2):
        assert set(zip(one, other, strict=True)) == set(itertools.product(set(one), set(other)))


@pytest.mark.thorough
def test_smollm2_agrees_with_transformers() -> None:
    with InferenceEngine(EngineConfig(model_path=MODEL, dtype="float32", **COMMON)) as engine:
        token_ids = prompts(engine)[:4]
        samples, _ = complete(
            engine, token_ids, SamplingParams(temperature=0, max_tokens=16), 1, preempted=False
        )
    actual = agreement(smollm2_oracle(), samples)
    assert actual.tokens_equal == actual.tokens
    assert actual.largest_difference <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_has_the_same_bits_in_other_configurations(dtype: str) -> None:
    with InferenceEngine(EngineConfig(model_path=MODEL, dtype="bfloat16", **COMMON)) as engine:
        token_ids = prompts(engine)[:2]
    rows = ROWS[1:2] + ROWS[4:5]
    for result in compare_rows(MODEL, dtype, token_ids, 6, rows, **COMMON):
        assert result["equal"] == result["samples"], result


@pytest.mark.thorough(but=["False-cpu-linear", "True-reference-default"])
@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize(("tie", "backend"), [(False, "cpu"), (True, "cpu"), (True, "reference")])
def test_tiny_models_agree_with_transformers(
    tmp_path: Path, rope: str, tie: bool, backend: Backend
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path, rope=rope, tie=tie)
    oracle = AutoModelForCausalLM.from_pretrained(folder).eval()
    token_ids = [list(range(3, 3 + length)) for length in (1, 5, 40, 200)]
    with InferenceEngine(
        EngineConfig(model_path=str(folder), dtype="float32", backend=backend, **TINY)
    ) as engine:
        samples, _ = complete(
            engine, token_ids, SamplingParams(temperature=0, max_tokens=64), 1, preempted=False
        )
    actual = agreement(oracle, samples)
    assert actual.tokens_equal == actual.tokens
    assert actual.largest_difference <= TOLERANCE


@pytest.mark.thorough(
    but=[
        "llama-radix-cpu",
        "llama-bias-paged-cpu",
        "llama-bias-radix-cpu",
        "mistral-paged-cpu",
        "mistral-radix-cpu",
        "qwen2-paged-cpu",
        "qwen3-paged-cpu",
        "qwen3-radix-cpu",
        "olmo2-paged-cpu",
        "olmo2-radix-cpu",
        "granite-paged-cpu",
        "granite-radix-cpu",
        "glm4-paged-cpu",
    ]
)
@pytest.mark.parametrize(
    ("cache_type", "backend"),
    [("paged", "cpu"), ("radix", "cpu"), ("paged", "reference"), ("radix", "reference")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_model_families_agree_with_transformers(
    tmp_path: Path, family: str, cache_type: CacheType, backend: Backend
) -> None:
    """Prompts exceed the windows, and the last prompt hits the previous one in the cache."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path, family)
    oracle: Any
    oracle, loaded = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # pyright: ignore
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    token_ids = [list(range(3, 3 + length)) for length in (1, 5, 40, 200, 220)]
    common = {"dtype": "float32", "max_batch_size": 2, **TINY}
    config = EngineConfig(model_path=str(folder), cache_type=cache_type, backend=backend, **common)
    with InferenceEngine(config) as engine:
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        samples, _ = complete(engine, token_ids, params, 1, preempted=False)
        assert samples[-1].cached_tokens > 0
    actual = agreement(oracle.eval(), samples)
    assert actual.tokens_equal == actual.tokens
    assert actual.largest_difference <= TOLERANCE


@pytest.mark.thorough(but=["llama-float32-cpu", "qwen3-float32-cpu", "olmo2-float32-cpu"])
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [("float32", "cpu"), ("bfloat16", "cpu"), ("bfloat16", "reference"), ("float16", "reference")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_model_families_keep_their_bits_in_other_configurations(
    tmp_path: Path, family: str, dtype: str, backend: Backend
) -> None:
    folder = tiny_model(tmp_path, family)
    token_ids = [list(range(3, 3 + length)) for length in (1, 30, 33, 70, 130)]
    rows = (ROWS[1], ROWS[4], ROWS[5])
    for result in compare_rows(str(folder), dtype, token_ids, 12, rows, backend=backend, **TINY):
        assert result["equal"] == result["samples"], result


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rope", "dtype", "backend"),
    [
        *itertools.product(
            ["default", "linear", "llama3", "yarn"], ["float32", "bfloat16"], ["cpu"]
        ),
        ("default", "float32", "reference"),
    ],
)
def test_tiny_models_keep_their_bits_in_every_configuration(
    tmp_path: Path, rope: Rope, dtype: str, backend: Backend
) -> None:
    folder = tiny_llama(tmp_path, rope=rope)
    token_ids = [list(range(3, 3 + length)) for length in (1, 8, 30, 33, 64, 70, 100, 130)]
    for result in compare_rows(str(folder), dtype, token_ids, 16, backend=backend, **TINY):
        assert result["equal"] == result["samples"], result
        assert result["forced"] > 0 or not result["preempted"]
