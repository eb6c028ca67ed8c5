"""Draft heads trained on samples of their policy."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference import (
    ConfigError,
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
)
from nano_inference.drafts.eagle import EagleDrafts
from nano_inference.drafts.heads import EagleSpec, MedusaSpec
from nano_inference.rl.draft_modules import eagle_rows, medusa_rows
from nano_inference.rl.draft_training import DraftTrainer, Kind, frequent_tokens
from tests.drafts.heads import eagle_of_speculators, medusa_of_vllm, write_heads
from tests.models.tiny import tiny_llama

VOCAB = 24
LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=3)
CONFIG: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_cache_memory": 2**20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The next token mostly follows from the previous one, so little training is needed."""
    folder = tiny_llama(tmp_path_factory.mktemp("policy"), vocab_size=VOCAB, layers=3)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 3
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor *= 0.05
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(str(model), **CONFIG)) as built:
        yield built


@pytest.fixture(scope="module")
def samples(engine: InferenceEngine) -> list[TrainingSample]:
    return engine.generate(prompts(40), LONG)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(3, VOCAB) for _ in range(4)] for _ in range(count)]


def share_right(engine: InferenceEngine, kind: str) -> float:
    """Return the share of right first drafts in unseen samples."""
    assert engine.drafter is not None
    engine.drafter.costs = None
    before = engine.drafter.stats()
    engine.generate(prompts(12, seed=9), LONG)
    after = engine.drafter.stats()

    def more(stats: Any, name: str) -> int:
        return getattr(stats, name).get(kind, (0,))[0]

    drafted = more(after, "drafted") - more(before, "drafted")
    return (more(after, "accepted") - more(before, "accepted")) / drafted


@pytest.mark.thorough(cases=["eagle"])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_learn_policy_samples(
    engine: InferenceEngine, model: Path, samples: list[TrainingSample], tmp_path: Path, kind: Kind
) -> None:
    """Acceptance rises both by the trainer's measure and in a live engine that drafts with the
    updated heads.
    """
    trainer = DraftTrainer(engine, kind, places=2, learning_rate=3e-3)
    trainer.save(tmp_path / "new")
    before = trainer.agreement(samples[:8])
    config = EngineConfig(str(model), **CONFIG, draft_model=str(tmp_path / "new"), max_drafts=2)
    with InferenceEngine(config) as live:
        plain = engine.generate(prompts(6, seed=9), LONG)
        at_first = share_right(live, kind)
        # samples of the live engine, as in a training loop
        refreshing = DraftTrainer.from_folder(live, tmp_path / "new", places=2, learning_rate=3e-3)
        refreshing.refresh(samples[8:], epochs=8)
        after = refreshing.agreement(samples[:8])
        assert after[0] > before[0] + 0.1
        assert after[0] >= after[1]
        assert share_right(live, kind) > at_first + 0.1
        drafted = live.generate(prompts(6, seed=9), LONG)
        for one, other in zip(plain, drafted, strict=True):
            assert (one.completion_tokens, one.logprobs) == (
                other.completion_tokens,
                other.logprobs,
            )
        refreshing.save(tmp_path / "learned")
        names = load_file(tmp_path / "learned" / "model.safetensors")
        assert set(names) == set(load_file(tmp_path / "new" / "model.safetensors"))
    config = EngineConfig(str(model), **CONFIG, draft_model=str(tmp_path / "learned"))
    with InferenceEngine(config) as again:
        assert share_right(again, kind) > at_first + 0.1


@pytest.mark.thorough(cases=["eagle"])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_train_on_few_tokens(
    engine: InferenceEngine, model: Path, samples: list[TrainingSample], tmp_path: Path, kind: Kind
) -> None:
    known = frequent_tokens(samples, 20, VOCAB)
    assert known == sorted(set(known))
    trainer = DraftTrainer(engine, kind, places=2, known_tokens=known, learning_rate=3e-3)
    trainer.train(samples[8:], epochs=5)
    trainer.save(tmp_path / "few")
    again = DraftTrainer.from_folder(engine, tmp_path / "few", places=2)
    assert again.known.tolist() == known
    assert again.agreement(samples[:4]) == trainer.agreement(samples[:4])
    config = EngineConfig(str(model), **CONFIG, draft_model=str(tmp_path / "few"))
    with InferenceEngine(config) as live:
        assert share_right(live, kind) > 0.1


def test_training_and_drafting_compute_the_same_logits(model: Path, tmp_path: Path) -> None:
    """Cover every norm and switch. Compare with the engine's rows one by one."""
    config, tensors = eagle_of_speculators(vocab=VOCAB)
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    folder = write_heads(tmp_path / "heads", config, tensors)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    guesses: dict[int, list[int]] = {}
    options = CONFIG | {"draft_model": str(folder), "max_drafts": 1}
    with InferenceEngine(EngineConfig(str(model), **options)) as live:
        assert live.drafter is not None
        assert isinstance(live.drafter.model, EagleDrafts)
        live.drafter.costs = None
        propose = live.drafter.model.propose

        def noted(seqs: Any, most: int) -> Any:
            drafts = propose(seqs, most)
            guesses[len(seqs[0].token_ids)] = list(drafts[0].token_ids)
            return drafts

        live.drafter.model.propose = noted  # type: ignore[method-assign]
        samples = live.generate([[5, 9, 4, 13]], params)
        trainer = DraftTrainer.from_folder(live, folder, places=1)
        (rows,) = trainer._rows(samples)
        assert isinstance(trainer.spec, EagleSpec)
        (hidden,) = eagle_rows(trainer.spec, trainer.params, rows, 1)
        best = (hidden @ trainer.params["lm_head.weight"].T).argmax(-1).tolist()
    start, _ = rows.targets(0)
    expected = {start + 1 + i: [token] for i, token in enumerate(best)}
    compared = {at: guess for at, guess in guesses.items() if guess and at in expected}
    assert len(compared) > 4
    assert compared == {at: expected[at] for at in compared}


def test_medusa_heads_read_the_same_row(engine: InferenceEngine, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "heads", *medusa_of_vllm(vocab=VOCAB))
    trainer = DraftTrainer.from_folder(engine, folder)
    assert isinstance(trainer.spec, MedusaSpec)
    assert trainer.places == 3
    (rows,) = trainer._rows(engine.generate([[5, 9, 4, 13]], LONG))
    actual = medusa_rows(trainer.spec, trainer.params, rows, 3)
    for index, head_rows in enumerate(actual):
        start, stop = rows.targets(index)
        assert len(head_rows) == stop - start > 30
    # last rows without a target are not read
    assert torch.isfinite(torch.cat(actual)).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "hydra"}, "got 'hydra'"),
        ({"places": 0}, "places=0"),
        ({"known_tokens": [3, 24]}, "known_tokens must be ids from 0 to 23"),
    ],
)
def test_trainer_rejects_untrainable_models(
    engine: InferenceEngine, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        DraftTrainer(engine, **options)


def test_trainer_rejects_empty_data(engine: InferenceEngine, model: Path, tmp_path: Path) -> None:
    trainer = DraftTrainer(engine, "medusa")
    with pytest.raises(InvalidRequest, match="no samples with a completion"):
        trainer.train([])
    sample = engine.generate([[3, 4]], SamplingParams(max_tokens=4))[0]
    with pytest.raises(InvalidRequest, match="token id 24 is outside the vocabulary"):
        trainer.train([replace(sample, completion_tokens=(3, VOCAB))])
    with pytest.raises(InvalidRequest, match="has 602 tokens; this engine computes at most"):
        trainer.train([replace(sample, completion_tokens=(3,) * 600)])
    assert trainer.train([sample]) > 0  # the engine is still running
    with pytest.raises(ConfigError, match="does not hold Medusa heads"):
        DraftTrainer.from_folder(engine, model)
    trainer.save(tmp_path / "one")
    with pytest.raises(ConfigError, match="already holds a model"):
        trainer.save(tmp_path / "one")
