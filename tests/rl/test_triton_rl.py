"""RL on the CUDA backend in Triton's interpreter: the trainer's numbers equal the engine's bit for
bit.
"""

from collections.abc import Iterator

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, LoraSettings, SamplingParams
from nano_inference.rl import LoraPolicy, PolicyModel, replay, score
from tests.models.tiny import llama_config, llama_weights, write_model

pytest.importorskip("triton")

CONFIG = llama_config(layers=1, hidden=32, num_heads=2, num_kv_heads=1, inner=48, vocab_size=60)
PROMPT = [5, 9, 2, 7, 7]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceEngine]:
    folder = write_model(tmp_path_factory.mktemp("policy"), CONFIG, llama_weights(CONFIG))
    options = {
        "device": DEVICE,
        "backend": "cuda",
        "batch_invariant": True,
        "kv_cache_memory": 2**20,
        "block_size": 4,
    }
    options |= {"cuda_graphs": False}  # tested elsewhere
    options |= {"max_loras": 1, "max_lora_rank": 20}
    with InferenceEngine(
        EngineConfig(model_path=str(folder), dtype="float32", seed=0, **options)
    ) as built:
        yield built


@pytest.mark.thorough
def test_samples_are_replayed_and_scored_bit_for_bit(engine: InferenceEngine) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.8, raw_logprobs=True, ignore_eos=True)
    samples = engine.generate([PROMPT], params, 2)
    for sample in samples:
        again = replay(engine, sample)
        assert (again.completion_tokens, again.logprobs) == (
            sample.completion_tokens,
            sample.logprobs,
        )
        (scores,) = score(engine, [sample.prompt_tokens + sample.completion_tokens])
        assert tuple(scores[len(sample.prompt_tokens) :].tolist()) == sample.raw_logprobs


@pytest.mark.thorough
def test_policy_model_matches_samples_and_its_update_is_served(
    engine: InferenceEngine,
) -> None:
    policy = PolicyModel(engine)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    for _ in range(2):
        samples = engine.generate([PROMPT], params)
        actual = policy.logprobs(
            [sample.prompt_tokens + sample.completion_tokens for sample in samples]
        )
        for sample, row in zip(samples, actual, strict=True):
            assert tuple(row[len(sample.prompt_tokens) :].tolist()) == sample.logprobs
        optimizer.zero_grad()
        torch.stack([row[1:].sum() for row in actual]).sum().neg().backward()
        gradients = [param.grad for param in policy.parameters() if param.grad is not None]
        assert len(gradients) == len(list(policy.parameters()))
        assert all(bool(torch.isfinite(each).all()) and bool(each.any()) for each in gradients)
        optimizer.step()
        policy.publish()


@pytest.mark.thorough
def test_lora_policy_matches_samples_and_its_update_is_served(engine: InferenceEngine) -> None:
    targets = ("q_proj", "v_proj", "down_proj", "lm_head")
    policy = LoraPolicy(engine, LoraSettings(rank=18, alpha=9.0, targets=targets))
    params = SamplingParams(max_tokens=3, ignore_eos=True, adapter="trainer")
    optimizer = torch.optim.SGD(policy.parameters(), lr=2.0)
    logprobs: list[tuple[float, ...]] = []
    for version in (1, 2, 3):
        assert policy.publish().version == version
        (sample,) = engine.generate([PROMPT], params)
        logprobs.append(sample.logprobs)
        tokens = sample.prompt_tokens + sample.completion_tokens
        (actual,) = policy.logprobs([tokens], from_position=len(PROMPT))
        assert tuple(actual.tolist()) == sample.logprobs
        optimizer.zero_grad()
        actual.sum().backward()
        for name, param in policy.named_parameters():
            assert param.device == torch.device(DEVICE)
            assert param.grad is not None
            assert bool(param.grad.isfinite().all())
            # A has no gradient while B is zero
            assert bool(param.grad.any()) or (version == 1 and "lora_A" in name), name
        optimizer.step()
    assert len(set(logprobs)) == 3
