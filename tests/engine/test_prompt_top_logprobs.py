"""Top logprobs of prompt tokens: equal to teacher forcing, and bit-identical under every schedule."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
)
from nano_inference.core.apply import preempt
from nano_inference.models.decoder import BEST_TILE
from tests.models.tiny import tiny_llama
from tests.ops.compiler import NEEDS_COMPILER

PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 40, 70)]
PARAMS = SamplingParams(
    temperature=0.7,
    top_k=5,
    max_tokens=20,
    seed=5,
    presence_penalty=1.0,
    logit_bias={7: 50.0},
    prompt_logprobs=True,
    prompt_top_logprobs=4,
)
SCHEDULES: list[dict[str, Any]] = [
    {"cache_type": "radix", "block_size": 4, "max_chunk_tokens": 5},
    {"max_batch_size": 4, "max_tokens_per_batch": 7, "lookahead": 1},
    {
        "enable_prefix_caching": False,
        "lookahead": 1,
        "block_size": 8,
        "kv_cache_memory": 16 * 8 * 1600,
    },
]
BACKENDS = ["reference", pytest.param("cpu", marks=NEEDS_COMPILER)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


def build(model: Path, **options: Any) -> InferenceEngine:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24}
    return InferenceEngine(EngineConfig(model_path=str(model), **(defaults | options)))


def best_of(sample: TrainingSample) -> tuple[TopLogprobs, ...]:
    assert sample.prompt_top_logprobs is not None
    return sample.prompt_top_logprobs


def complete(engine: InferenceEngine, params: list[SamplingParams]) -> list[TrainingSample]:
    """Sample every prompt three times. Every third step preempts some sequence, eight times in all."""
    for prompt, prompt_params in zip(PROMPTS, params, strict=True):
        engine.add_request(prompt, prompt_params, 3)
    samples: list[TrainingSample] = []
    step = forced = 0
    while engine.has_pending():
        samples += engine.step()
        step += 1
        running = engine.loop.sequences.running
        if step % 3 == 0 and forced < 8 and running:
            preempt(running[-1], engine.loop.sequences, engine.cache)
            forced += 1
        engine.loop.check()
    assert forced
    return samples


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_top_logprobs_equal_teacher_forcing(model: Path, backend: str) -> None:
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(model)
    with build(model, max_chunk_tokens=7, backend=backend) as engine:
        for prompt in PROMPTS:
            (sample,) = engine.generate(prompt, PARAMS)
            first, *rest = best_of(sample)
            assert first == TopLogprobs((), ())
            assert len(rest) == len(prompt) - 1
            with torch.inference_mode():
                logprobs = oracle.eval()(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
            for row, best in enumerate(rest):
                values = torch.tensor(best.logprobs)
                torch.testing.assert_close(values, logprobs[row].topk(4).values, rtol=0, atol=1e-4)
                torch.testing.assert_close(
                    values, logprobs[row][list(best.token_ids)], rtol=0, atol=1e-4
                )


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprob_has_the_same_bits_in_every_field(model: Path, backend: str) -> None:
    """The same bits appear for the prompt's own tokens and as the raw logprob of a sampled token."""
    greedy = SamplingParams(0, max_tokens=12, raw_logprobs=True, ignore_eos=True)
    with build(model, backend=backend) as engine:
        (drawn,) = engine.generate(PROMPTS[1], greedy)
        whole = [*drawn.prompt_tokens, *drawn.completion_tokens]
        (scored,) = engine.generate(whole, replace(PARAMS, prompt_top_logprobs=300))
    assert drawn.raw_logprobs is not None
    assert scored.prompt_logprobs is not None
    for position, token_id in list(enumerate(whole))[1:]:
        best = best_of(scored)[position]
        assert len(best.token_ids) == len(set(best.token_ids)) == 300
        assert best.logprobs[best.token_ids.index(token_id)] == scored.prompt_logprobs[position]
    for i, token_id in enumerate(drawn.completion_tokens):
        best = best_of(scored)[len(drawn.prompt_tokens) + i]
        assert (best.token_ids[0], best.logprobs[0]) == (token_id, drawn.raw_logprobs[i])


@pytest.mark.thorough(but=["schedule2-cpu"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_changes_no_bit(model: Path, backend: str, schedule: dict[str, Any]) -> None:
    """Covers chunks, forced preemption, groups, and neighbors with more, fewer or no top logprobs."""
    wants = [replace(PARAMS, prompt_top_logprobs=num) for num in (4, 9, 2, 0)]
    with build(model, backend=backend) as engine:
        alone = [
            engine.generate(prompt, replace(PARAMS, prompt_top_logprobs=9))[0] for prompt in PROMPTS
        ]
    with build(model, backend=backend, **schedule) as engine:
        for turn in range(4):
            mine = wants[turn:] + wants[:turn]
            samples = complete(engine, mine)
            assert len(samples) == 12
            for sample in samples:
                index = PROMPTS.index(list(sample.prompt_tokens))
                num = mine[index].prompt_top_logprobs
                cut = tuple(
                    TopLogprobs(best.token_ids[:num], best.logprobs[:num])
                    for best in best_of(alone[index])
                )
                assert sample.prompt_top_logprobs == (cut if num else None)
                assert sample.prompt_logprobs is not None
                assert sample.prompt_logprobs[1:] == (alone[index].prompt_logprobs or ())[1:]


def test_prompt_may_exceed_a_tile_of_rows(model: Path) -> None:
    prompt = [3 + i % 290 for i in range(BEST_TILE + 40)]
    with build(model) as engine:
        (whole,) = engine.generate(prompt, PARAMS)
    with build(model, max_chunk_tokens=33) as engine:
        (chunked,) = engine.generate(prompt, PARAMS)
    assert len(best_of(whole)) == len(prompt)
    assert best_of(whole) == best_of(chunked)


@pytest.mark.thorough(but=["3"])
@pytest.mark.parametrize("steps", [1, 3, 14])
def test_resume_from_keeps_or_rescores_prompt_logprobs(model: Path, steps: int) -> None:
    """Abort in the middle of the prompt, which drops partial results, and after it."""
    with build(model, max_chunk_tokens=8) as engine:
        (expected,) = engine.generate(PROMPTS[2], PARAMS)
        engine.add_request(PROMPTS[2], PARAMS)
        for _ in range(steps):
            engine.step()
        (partial,) = engine.abort()
        known = min(8 * steps + 1, 40)
        assert best_of(partial) == best_of(expected)[:known]
        assert len(partial.prompt_logprobs or ()) == known
        engine.resume_from(partial)
        samples: list[TrainingSample] = []
        while engine.has_pending():
            samples += engine.step()
    assert best_of(samples[0]) == best_of(expected)
    assert samples[0].completion_tokens == expected.completion_tokens


def test_reference_model_computes_no_prompt_top_logprobs(model: Path) -> None:
    with build(model, ref_model_path=str(model)) as engine:
        (sample,) = engine.generate(PROMPTS[1], PARAMS)
    assert len(best_of(sample)) == len(PROMPTS[1])
    assert sample.ref_logprobs is not None


def test_update_rescores_the_prompt(model: Path) -> None:
    with build(model, max_chunk_tokens=8) as engine:
        engine.add_request(PROMPTS[2], PARAMS)
        engine.step()
        engine.update_weights({"model.norm.weight": torch.full((64,), 0.5)}, blocking=True)
        samples: list[TrainingSample] = []
        while engine.has_pending():
            samples += engine.step()
        (expected,) = engine.generate(PROMPTS[2], PARAMS)
    assert best_of(samples[0]) == best_of(expected)
    assert not any(math.isnan(p) for best in best_of(expected) for p in best.logprobs)
