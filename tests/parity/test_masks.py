"""Logprobs under masks against transformers: `logprobs` under its processors; with `log_kept_mass`,
over the whole vocabulary.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.config import Backend
from nano_inference.rl import replay
from tests.models.tiny import tiny_llama

PROMPT = [1, 17, 40, 5, 99]
ALLOWED = frozenset(range(40, 60))
STOPS = frozenset(range(2, 150))
MASKS: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": ALLOWED},
    "few allowed, cold": {"allowed_token_ids": frozenset({7, 8}), "temperature": 0.1},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": STOPS},
    "min_tokens for a while": {
        "min_tokens": 3,
        "stop_token_ids": frozenset({2, 3}),
        "temperature": 1.4,
    },
    "both": {
        "min_tokens": 6,
        "stop_token_ids": frozenset(range(40, 58)),
        "allowed_token_ids": ALLOWED,
    },
    "with a filter": {"allowed_token_ids": ALLOWED, "top_k": 3, "temperature": 0.7},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("masks"))


def by_transformers(
    folder: Path, sample: TrainingSample, params: SamplingParams
) -> tuple[list[float], list[float]]:
    """Return logprobs of a sample's tokens at its temperature, both masked and over the whole
    vocabulary.
    """
    from transformers import (
        AutoModelForCausalLM,
        MinNewTokensLengthLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
    )

    model, known = AutoModelForCausalLM.from_pretrained(folder).eval(), len(sample.prompt_tokens)
    processors: list[Any] = []
    if params.min_tokens:
        stops = [*params.stop_token_ids, model.config.eos_token_id]
        processors.append(
            MinNewTokensLengthLogitsProcessor(known, params.min_tokens, stops, device="cpu")
        )
    if params.allowed_token_ids is not None:
        allowed = sorted(params.allowed_token_ids)
        processors.append(
            PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, num_beams=1)
        )
    ids = torch.tensor([sample.prompt_tokens + sample.completion_tokens])
    with torch.no_grad():
        logits = model(ids).logits[0].double()
    masked, whole = list[float](), list[float]()
    for position, token in enumerate(sample.completion_tokens, start=known):
        row = cut = logits[position - 1 : position]
        for processor in processors:
            cut = processor(ids[:, :position], cut)
        whole.append(float((row / params.temperature).log_softmax(dim=-1)[0, token]))
        masked.append(float((cut / params.temperature).log_softmax(dim=-1)[0, token]))
    return masked, whole


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_masked_logprobs_and_kept_mass_match_the_full_vocabulary(
    folder: Path, backend: Backend
) -> None:
    config = EngineConfig(
        model_path=str(folder),
        dtype="float32",
        backend=backend,
        device="cpu",
        kv_cache_memory=2**24,
    )
    with InferenceEngine(config) as engine:
        for name, options in MASKS.items():
            params = SamplingParams(max_tokens=6, seed=3, **options)
            (sample,) = engine.generate(PROMPT, params)
            masked, whole = by_transformers(folder, sample, params)
            mass = sample.log_kept_mass or ()
            total = [own + kept for own, kept in zip(sample.logprobs, mass, strict=True)]
            assert total == pytest.approx(whole, abs=2e-4), name
            assert min(mass) < -1e-4, name
            if not params.filters:
                assert list(sample.logprobs) == pytest.approx(masked, abs=2e-4), name
            streamed = [
                delta.log_kept_mass for delta in engine.generate(PROMPT, params, stream=True)
            ]
            assert sum((each or () for each in streamed), ()) == mass, name
            assert replay(engine, sample).log_kept_mass == mass, name
        greedy = SamplingParams(
            max_tokens=3, temperature=0, raw_logprobs=True, allowed_token_ids=ALLOWED
        )
        (sample,) = engine.generate(PROMPT, greedy)
        assert sample.log_kept_mass == (0.0,) * 3, (
            "logprobs are the raw ones, of which nothing is missing"
        )
        assert sample.logprobs == sample.raw_logprobs
