"""A budget of thought and bad words in the engine: forced tokens, their logprobs, and errors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nano_inference import (
    EngineConfig,
    Grammar,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
)
from nano_inference.rl import differences, replay
from nano_inference.sampling.tensors import DrawRequest, sampling_batch
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
CLOSES = b"</think>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama(tmp_path_factory.mktemp("thinking"), seed=0)
    write_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(str(model), max_batch_size=8)) as engine:
        yield engine


def ids_of(engine: InferenceEngine, text: str) -> list[int]:
    return engine.tokenizer.encode(text)


def thinking(**fields: object) -> SamplingParams:
    options = {"max_tokens": 24, "seed": 1, "thinking_token_budget": 5, "raw_logprobs": True}
    return SamplingParams(**{**options, **fields})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budget_closes_the_thought(
    engine: InferenceEngine, budget: int, temperature: float
) -> None:
    prompt, closes = ids_of(engine, "1+1<think>"), ids_of(engine, "</think>")
    params = thinking(thinking_token_budget=budget, temperature=temperature)
    free = replace(params, thinking_token_budget=None)
    (sample,), (unlimited,) = engine.generate(prompt, params), engine.generate(prompt, free)
    forced = slice(budget, budget + len(closes))
    assert list(sample.completion_tokens[forced]) == closes
    assert sample.completion_tokens[:budget] == unlimited.completion_tokens[:budget]
    assert unlimited.completion_tokens[forced] != tuple(closes)
    raw, mass = sample.raw_logprobs or (), sample.log_kept_mass or ()
    if temperature:
        assert sample.logprobs[forced] == (0.0,) * len(closes)
        assert mass[:budget] == (0.0,) * budget
        assert mass[forced] == pytest.approx(raw[forced], abs=1e-5)  # all that was left
    else:
        assert sample.logprobs == raw
