"""Scores and gradients under all masks of a sample's parameters reproduce the bits of sampling."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import Grammar, InvalidRequest, SamplingParams, TrainingSample
from nano_inference.rl import PolicyModel, score
from tests.models.tiny import tiny_llama
from tests.ops.compiler import NEEDS_COMPILER
from tests.rl.training import bits, build
from tests.structured.vocabularies import with_tokenizer

BUDGET, MARKER = 4, 8
MASKS: dict[str, Any] = {
    "budget": {"thinking_token_budget": BUDGET},
    "words": {"bad_words": ("a", "b", "<", "ab", "th")},
    "allowed": {"allowed_token_ids": frozenset(range(2, 90)), "min_tokens": 9},
    "all": {
        "thinking_token_budget": BUDGET,
        "bad_words": ("a", "12", "3"),
        "allowed_token_ids": frozenset(range(259)),
        "min_tokens": 16,
        "grammar": replace(Grammar.regex("[0-9]{4,9}"), after="</think>"),
    },
}
BACKENDS = [pytest.param("cpu", marks=NEEDS_COMPILER), "reference"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("masks"), seed=0))


def whole(sample: TrainingSample) -> list[int]:
    return [*sample.prompt_tokens, *sample.completion_tokens]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_scores_under_parameters_have_the_sampled_bits(
    folder: Path, backend: str, temperature: float
) -> None:
    with build(folder, backend=backend) as engine:
        prompt = engine.tokenizer.encode("1+1<think>")
        params = [
            SamplingParams(temperature=temperature, max_tokens=30, seed=seed, **fields)
            for fields in MASKS.values()
            for seed in (1, 2)
        ]
        samples = engine.generate([prompt] * len(params), params)
        scores = score(
            engine,
            map(whole, samples),
            from_position=len(prompt),
            temperature=temperature,
            grammar=[sample.sampling_params for sample in samples],
        )
        for sample, scored in zip(samples, scores, strict=True):
            assert sample.finish_reason != "abort", sample.stop_reason
            assert bits(scored) == bits(torch.tensor(sample.logprobs)), sample.sampling_params


def test_forced_tokens_have_no_gradient(folder: Path) -> None:
    with build(folder) as engine:
        prompt = engine.tokenizer.encode("1+1<think>")
        params = SamplingParams(max_tokens=24, seed=1, thinking_token_budget=BUDGET)
        (sample,) = engine.generate(prompt, params)
        model = PolicyModel(engine)
        for forced in (True, False):
            model.zero_grad()
            (logprobs,) = model.logprobs(
                [whole(sample)], from_position=len(prompt), grammar=sample.sampling_params
            )
            assert bits(logprobs.detach()) == bits(torch.tensor(sample.logprobs))
            marker = slice(BUDGET, BUDGET + MARKER)
            (logprobs[marker] if forced else logprobs).sum().backward()
            grads = [each.grad for each in model.parameters() if each.grad is not None]
            assert any(bool(each.abs().max() > 0) for each in grads) is not forced


def test_tokens_of_other_parameters_are_rejected(folder: Path) -> None:
    with build(folder) as engine:
        ids = engine.tokenizer.encode("<think>abcdefghijk")
        params = SamplingParams(thinking_token_budget=2)
        with pytest.raises(InvalidRequest, match="at position 9 of sequence 0 is masked"):
            score(engine, [ids], from_position=7, grammar=params)
        with pytest.raises(InvalidRequest, match="must be a Grammar or SamplingParams"):
            score(engine, [ids], grammar="a")  # pyright: ignore[reportArgumentType]
