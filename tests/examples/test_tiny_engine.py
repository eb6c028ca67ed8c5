"""`examples/tiny_engine.py` samples the engine's tokens under any step sizes."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nano_inference
from examples import tiny_engine
from examples.tiny_engine import EngineConfig, SamplingParams, Sequence
from tests.models.tiny import tiny_llama

PREFIX = [(7 * i) % 290 + 3 for i in range(40)]
PROMPTS = [[5], PREFIX, [*PREFIX[:33], 9, 8], list(range(3, 60)), [*PREFIX, 11]]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
# budgets that cut prompts into chunks, and caches so small that sequences are preempted
CONFIGS = (
    EngineConfig(block_size=16, num_kv_blocks=64),
    EngineConfig(block_size=4, num_kv_blocks=26, max_batch_size=3, max_tokens_per_batch=7),
    EngineConfig(block_size=8, num_kv_blocks=14, max_tokens_per_batch=32),
)


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "model", tie=request.param, seed=3)


def run(engine: tiny_engine.InferenceEngine) -> int:
    """Step until no request is left. Return the number of computed rows."""
    rows = steps = 0
    while engine.waiting or engine.running:
        steps += 1
        assert steps < 1000, "no progress"
        seqs = [*engine.waiting, *engine.running]
        queues = (engine.waiting, engine.running, engine.cache, engine.config)
        decision = tiny_engine.schedule(*queues, engine.weight_version)
        rows += sum(chunk.length for chunk in decision.chunks)
        assert sum(chunk.length for chunk in decision.chunks) <= engine.config.max_tokens_per_batch
        engine.step()
        check(engine, seqs)
    return rows


def check(engine: tiny_engine.InferenceEngine, seqs: list[Sequence]) -> None:
    """Check that every block is free or held by as many sequences as the cache counts."""
    cache = engine.cache
    held = [block for seq in engine.running for block in seq.block_ids]
    assert cache.num_holders == [held.count(block) for block in range(len(cache.num_holders))]
    assert set(cache.free) == set(range(len(cache.num_holders))) - set(held)
    assert all(len(seq.logprobs) == len(seq.weight_versions) for seq in seqs)


def update_of(folder: Path) -> dict[str, torch.Tensor]:
    norm = tiny_engine.Decoder(folder, 1).params["model.norm.weight"]
    return {"model.norm.weight": norm * torch.linspace(-1, 2, len(norm))}


@pytest.mark.parametrize("config", CONFIGS)
def test_tiny_engine_samples_the_engines_greedy_tokens(folder: Path, config: EngineConfig) -> None:
    engine = tiny_engine.InferenceEngine(folder, config)
    mine = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    run(engine)
    params = nano_inference.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    real_config = nano_inference.EngineConfig(str(folder), dtype="float32", max_model_len=256)
    with nano_inference.InferenceEngine(real_config) as real:
        theirs = real.generate(PROMPTS, params)
    for seq, sample in zip(mine, theirs, strict=True):
        assert seq.token_ids == [*sample.prompt_tokens, *sample.completion_tokens]
        assert seq.logprobs == pytest.approx(list(sample.logprobs), abs=1e-3)


@pytest.mark.parametrize("config", CONFIGS)
def test_tiny_engine_updates_weights_like_the_engine(folder: Path, config: EngineConfig) -> None:
    prompt, update = PROMPTS[3], update_of(folder)
    engine = tiny_engine.InferenceEngine(folder, config)
    seq = engine.add_request(prompt, GREEDY)
    for _ in range(100):
        if len(seq.logprobs) < 10:
            engine.step()
    assert engine.update_weights(update) == 1
    run(engine)
    params = nano_inference.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    real_config = nano_inference.EngineConfig(str(folder), dtype="float32", max_model_len=256)
    with nano_inference.InferenceEngine(real_config) as real:
        (before,) = real.generate(prompt, params)
        real.update_weights(update)
        (after,) = real.generate(seq.token_ids[: len(prompt) + 10], params)
    assert seq.weight_versions == [0] * 10 + [1] * 14
    tokens = seq.token_ids[len(prompt) :]
    assert tokens[:10] == list(before.completion_tokens[:10])
    assert tokens[10:] == list(after.completion_tokens[:14])
    assert tokens != list(before.completion_tokens)


def test_tiny_engine_finds_prefixes_of_its_version_only(folder: Path) -> None:
    engine = tiny_engine.InferenceEngine(folder)
    engine.add_request(PREFIX, GREEDY)
    assert run(engine) == 40 + 23
    engine.add_request(PREFIX, GREEDY)
    assert run(engine) == 40 + 23 - 32  # two blocks of 16
    engine.update_weights(update_of(folder))
    engine.add_request(PREFIX, GREEDY)
    assert run(engine) == 40 + 23


@given(config=st.sampled_from(CONFIGS), order=st.permutations(range(5)), seed=st.integers(0, 99))
def test_tiny_engine_sampling_ignores_the_batch(
    config: EngineConfig, order: list[int], seed: int, folder: Path
) -> None:
    """Tokens at a temperature depend only on seed and prompt, in any order and cache."""
    params = SamplingParams(temperature=0.8, max_tokens=6, seed=seed)
    expected = []
    for prompt in PROMPTS:
        alone = tiny_engine.InferenceEngine(folder)
        expected.append(alone.add_request(prompt, params))
        run(alone)
    engine = tiny_engine.InferenceEngine(folder, config)
    together = {index: engine.add_request(PROMPTS[index], params) for index in order}
    run(engine)
    assert [together[index].token_ids for index in range(5)] == [s.token_ids for s in expected]


def test_schedule_writes_nothing(folder: Path) -> None:
    engine = tiny_engine.InferenceEngine(folder, CONFIGS[1])
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY)
    for _ in range(30):
        queues = (engine.waiting, engine.running, engine.cache, engine.config)
        before = deepcopy([vars(seq) for seq in (*engine.waiting, *engine.running)])
        free = list(engine.cache.free)
        tiny_engine.schedule(*queues, engine.weight_version)
        assert before == [vars(seq) for seq in (*engine.waiting, *engine.running)]
        assert free == list(engine.cache.free)
        engine.step()


def test_add_request_rejects_requests_larger_than_the_cache(folder: Path) -> None:
    engine = tiny_engine.InferenceEngine(folder, EngineConfig(block_size=4, num_kv_blocks=4))
    with pytest.raises(ValueError, match="must fit into 16 tokens"):
        engine.add_request([1, 2], SamplingParams(max_tokens=15))
    assert not engine.waiting


def test_update_weights_changes_nothing_on_a_mismatch(folder: Path) -> None:
    engine = tiny_engine.InferenceEngine(folder)
    good = engine.model.params["model.norm.weight"].clone()
    with pytest.raises(ValueError, match="lm_tail does not match"):
        engine.update_weights({"model.norm.weight": good * 2, "lm_tail": good})
    assert engine.model.params["model.norm.weight"].equal(good)
    assert engine.weight_version == 0
