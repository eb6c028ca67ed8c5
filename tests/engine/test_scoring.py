"""Reference and prompt logprobs: scored rows in an engine that also samples, under any schedule."""

import math
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
from nano_inference.core.sequence import Sequence
from tests.models.tiny import tiny_llama, tiny_model
from tests.parity.compare import complete

PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 40, 70)]
PARAMS = SamplingParams(
    temperature=0.7, top_p=0.9, max_tokens=20, seed=5, raw_logprobs=True, prompt_logprobs=True
)
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"cache_type": "radix", "block_size": 4, "max_chunk_tokens": 5},
    {"max_batch_size": 2, "max_tokens_per_batch": 7, "lookahead": 1},
    {
        "enable_prefix_caching": False,
        "lookahead": 1,
        "block_size": 8,
        "kv_cache_memory": 16 * 8 * 1600,
    },
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("policy"), seed=1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reference model of another shape with the same vocabulary."""
    return tiny_model(tmp_path_factory.mktemp("reference"), "qwen3", seed=2, num_hidden_layers=3)


def build(model: Path, **options: Any) -> InferenceEngine:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24}
    return InferenceEngine(EngineConfig(model_path=str(model), **(defaults | options)))


def scores_by_prompt(model: Path, sample: TrainingSample) -> tuple[float, ...]:
    """Return a model's logprobs of a sample's tokens, computed by passing them all as a prompt."""
    with build(model) as engine:
        known = [*sample.prompt_tokens, *sample.completion_tokens]
        (whole,) = engine.generate(known, SamplingParams(max_tokens=1, prompt_logprobs=True))
    assert whole.prompt_logprobs is not None
    return whole.prompt_logprobs


@pytest.mark.thorough(cases=["schedule1", "schedule2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frozen_copy_scores_policy_samples_bit_identically(
    policy: Path, schedule: dict[str, Any]
) -> None:
    with build(policy, ref_model_path=str(policy), **schedule) as engine:
        samples, _ = complete(engine, PROMPTS, PARAMS, 3, preempted=True)
        assert engine.cache.num_free_blocks() == engine.cache.num_blocks
    assert len(samples) == 12
    for sample in samples:
        assert sample.ref_logprobs == sample.raw_logprobs


@pytest.mark.thorough(cases=["schedule2", "schedule3"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reference_model_scores_samples_like_prompts(
    policy: Path, reference: Path, schedule: dict[str, Any]
) -> None:
    with build(policy, ref_model_path=str(reference), **schedule) as engine:
        samples = engine.generate(PROMPTS, PARAMS, 2)
        assert set(engine.runner.storages) == {"policy", "reference"}
    for sample in samples:
        expected = scores_by_prompt(reference, sample)
        assert sample.ref_logprobs == expected[len(sample.prompt_tokens) :]


@pytest.mark.thorough
def test_prompt_logprobs_equal_teacher_forcing(policy: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(policy)
    with build(policy, max_chunk_tokens=7) as engine:
        for prompt in PROMPTS:
            (sample,) = engine.generate(prompt, PARAMS)
            assert sample.prompt_logprobs is not None
            assert len(sample.prompt_logprobs) == len(prompt)
            assert math.isnan(sample.prompt_logprobs[0])
            with torch.inference_mode():
                logprobs = oracle.eval()(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
            expected = logprobs[:-1].gather(
                1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None]
            )[:, 0]
            torch.testing.assert_close(
                torch.tensor(sample.prompt_logprobs[1:]), expected, rtol=0, atol=1e-4
            )


def test_prompt_logprobs_bypass_the_cache_and_repeat(policy: Path) -> None:
    with build(policy) as engine:
        first = engine.generate([PROMPTS[3]], PARAMS)[0]
        again = engine.generate([PROMPTS[3]], PARAMS)[0]
        assert engine.generate([PROMPTS[3]], SamplingParams(max_tokens=1))[0].cached_tokens > 0
    assert again.cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert again.prompt_logprobs is not None
    assert first.prompt_logprobs[1:] == again.prompt_logprobs[1:]


def test_samples_of_a_group_share_the_scored_prompt(policy: Path) -> None:
    with build(policy, ref_model_path=str(policy), block_size=4) as engine:
        samples = engine.generate([PROMPTS[3]], PARAMS, 8)
        stats = engine.stats()
    assert stats.prompt_tokens_computed == len(PROMPTS[3])
    completions = sum(len(sample.completion_tokens) for sample in samples)
    assert len({sample.prompt_logprobs[1:] for sample in samples if sample.prompt_logprobs}) == 1
    # The policy computes the prompt and completions. The reference computes the prompt once and
    # each completion, except last tokens and rows that end a block before the prompts diverge.
    reference = stats.tokens_computed - len(PROMPTS[3]) - (completions - 8)
    assert reference <= len(PROMPTS[3]) + completions - 8 + 8 * 4


@pytest.mark.thorough
def test_policy_update_does_not_change_the_reference(policy: Path, reference: Path) -> None:
    with build(policy, ref_model_path=str(policy)) as engine:
        (before,) = engine.generate(PROMPTS[2], PARAMS)
        engine.update_weights({"model.norm.weight": torch.full((64,), 0.5)}, blocking=True)
        (after,) = engine.generate(PROMPTS[2], PARAMS)
        assert before.ref_logprobs == before.raw_logprobs
        assert after.ref_logprobs != after.raw_logprobs
    assert after.ref_logprobs == scores_by_prompt(policy, after)[len(after.prompt_tokens) :]


def test_abort_returns_a_sample_awaiting_scores_complete(policy: Path) -> None:
    with build(policy, ref_model_path=str(policy), max_tokens_per_batch=4) as engine:
        request_id = engine.add_request(PROMPTS[3], SamplingParams(max_tokens=3, seed=1))
        while not any(seq.request.scored_sample for seq in engine.loop.sequences.by_id.values()):
            assert engine.step() == []
        (sample,) = engine.abort(request_id)
        engine.loop.check()
        assert not engine.has_pending()
    assert sample.finish_reason == "length"
    assert len(sample.completion_tokens) == 3
    assert sample.ref_logprobs is None


def test_aborted_sample_is_not_scored(policy: Path) -> None:
    with build(policy, ref_model_path=str(policy)) as engine:
        engine.add_request(PROMPTS[1], SamplingParams(max_tokens=50, ignore_eos=True))
        for _ in range(5):
            engine.step()
        (sample,) = engine.abort()
        assert not engine.has_pending()
    assert sample.finish_reason == "abort"
    assert sample.ref_logprobs is None


def test_longest_possible_sample_is_scored(policy: Path) -> None:
    """Prompt and completion fill the whole cache. No space remains for a token that is never
    computed.
    """
    with build(
        policy, ref_model_path=str(policy), kv_cache_memory=4 * 16 * 512, max_batch_size=1
    ) as engine:
        room = engine.max_model_len
        assert room == engine.cache.num_blocks * 16
        params = SamplingParams(max_tokens=room - 1, ignore_eos=True, seed=3, raw_logprobs=True)
        (sample,) = engine.generate([7], params)
    assert sample.ref_logprobs == sample.raw_logprobs
    assert len(sample.completion_tokens) == room - 1


def test_reference_of_another_vocabulary_is_rejected(policy: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path, vocab_size=301)
    with pytest.raises(ConfigError, match=r"301.*300.*a model with the policy's vocabulary"):
        build(policy, ref_model_path=str(other))


def test_rows_scored_twice_count_once(policy: Path) -> None:
    with build(policy) as engine:
        seq: Sequence = engine.intake.sequence([1, 2, 3, 4, 5], PARAMS, 1, stream=False)
    assert seq.rows_to_score(0, 3) == range(3)
    seq.add_scores(0, [-1.0, -2.0, -3.0])
    seq.add_scores(1, [-2.0, -3.0, -4.0])
    assert seq.scores == [-1.0, -2.0, -3.0, -4.0]
    assert not seq.rows_to_score(0, 5)
