"""The policy's layer of multi-token prediction, trained on the policy's samples."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nano_inference import (
    ConfigError,
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
)
from nano_inference.arrays import as_torch
from nano_inference.drafts.drafter import Drafter
from nano_inference.drafts.mtp import MtpDrafts
from nano_inference.models.parameters.storage import form_of, numbers_of
from nano_inference.rl.mtp_training import MtpTrainer, joined
from tests.drafts.mtp import FAMILIES, VOCAB, MtpModel
from tests.models.tiny import tiny_model

TOLERANCE = 1e-4  # on a normed row, relative to its largest number
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "kv_cache_memory": 2**22,
    "draft_model": "mtp",
}
LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=3, allowed_token_ids=[17, 40, 41, 60])


@pytest.fixture(scope="module", params=["mimo", "qwen3.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpModel:
    return MtpModel(tmp_path_factory.mktemp("mtp"), FAMILIES[request.param])


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(3, VOCAB) for _ in range(4)] for _ in range(count)]


def built(folder: Path, **options: Any) -> InferenceEngine:
    """Return an engine that drafts whatever drafts cost."""
    engine = InferenceEngine(EngineConfig(str(folder), **(CONFIG | options)))
    if engine.drafter is not None:
        engine.drafter.costs = None
    return engine


def source_of(engine: InferenceEngine) -> MtpDrafts:
    assert isinstance(engine.drafter, Drafter)
    assert isinstance(engine.drafter.model, MtpDrafts)
    return engine.drafter.model


def test_mtp_training_computes_the_rows_of_drafts(model: MtpModel) -> None:
    """Compare every drafted row at depths 0 to 2, as long as the drafts are the sample's tokens."""
    drawn: dict[tuple[int, int], Tensor] = {}
    with built(model.folder, max_drafts=3) as engine:
        source = source_of(engine)
        propose, draw = source.propose, source.draw
        rows: list[Tensor] = []

        def kept(hidden: Any, batch: Any) -> Any:
            rows.append(as_torch(hidden)[0].clone())
            return draw(hidden, batch)

        def noted(seqs: Any, most: int) -> Any:
            rows.clear()
            (guess,) = propose(seqs, most)
            tokens = [*seqs[0].token_ids]
            for depth, row in enumerate(rows):
                drawn[len(tokens), depth] = row
                guesses[len(tokens)] = list(guess.token_ids)
            return [guess]

        guesses: dict[int, list[int]] = {}
        source.propose, source.draw = noted, kept  # type: ignore[method-assign]
        params = replace(LONG, allowed_token_ids=[17, 40], max_tokens=80)
        (sample,) = engine.generate([[5, 9, 4, 13]], params)
        trainer = MtpTrainer(engine, places=3)
        (policy_rows,) = trainer._rows([sample])
        with torch.no_grad():
            by_depth = trainer._module.rows(
                joined(trainer.params, trainer._table), policy_rows, trainer.places
            )
    tokens = [*sample.prompt_tokens, *sample.completion_tokens]
    compared = [0, 0, 0]
    for (length, depth), row in drawn.items():
        start, stop = policy_rows.targets(depth)
        target = length - 1 + depth  # row whose next token is drafted
        right = tokens[length : length + depth] == guesses[length][:depth]
        if right and start <= target < stop:
            expected = by_depth[depth][target - start]
            assert (row - expected).abs().max() <= TOLERANCE * expected.abs().max()
            compared[depth] += 1
    assert compared[0] > 10
    assert min(compared[1:]) > 0


@pytest.mark.thorough(cases=["mimo"])
def test_mtp_layer_learns_policy_samples(model: MtpModel, tmp_path: Path) -> None:
    """Agreement rises in the trainer and in the live engine, and no bit of a sample changes."""
    with built(model.folder, draft_model=None) as engine:
        plain = engine.generate(prompts(6, seed=9), LONG)
    with built(model.folder, max_drafts=2) as live:
        samples = live.generate(prompts(32), LONG)
        learned = range(VOCAB - 4)
        trainer = MtpTrainer(live, places=2, learned_tokens=learned, learning_rate=3e-3)
        before = trainer.agreement(samples[:8])
        trainer.refresh(samples[8:], epochs=6)
        after = trainer.agreement(samples[:8])
        assert after[0] > before[0] + 0.1
        drafted = live.generate(prompts(6, seed=9), LONG)
        for one, other in zip(plain, drafted, strict=True):
            assert one.weight_version == other.weight_version
            assert (one.completion_tokens, one.logprobs) == (
                other.completion_tokens,
                other.logprobs,
            )
        trainer.save(tmp_path / "learned")
        held = trainer.weights()
    saved, policy = (
        load_file(tmp_path / "learned" / "model.safetensors"),
        load_file(model.folder / "model.safetensors"),
    )
    for name, tensor in held.items():
        assert torch.equal(saved.pop(name), tensor)
        assert not torch.equal(policy.pop(name), tensor)
    assert all(torch.equal(tensor, policy[name]) for name, tensor in saved.items())
    with built(tmp_path / "learned") as again:
        assert MtpTrainer(again, places=2).agreement(samples[:8]) == after


def test_mtp_copies_in_8_bits_follow_updates(model: MtpModel) -> None:
    """Updates of the layer and of the policy reach the copies, and no bit of a sample changes."""
    with built(model.folder, draft_model=None, dtype="bfloat16") as engine:
        plain = engine.generate(prompts(6, seed=9), LONG)
    with built(model.folder, dtype="bfloat16", draft_quantization="int8") as live:
        source = source_of(live)
        assert source._copies is not None
        copied = {name for name, each in source._copies.params.items() if form_of(each)}
        assert {"head", "mtp.project", "mtp.layers.0.o"} <= copied
        drafted = live.generate(prompts(6, seed=9), LONG)
        assert [each.logprobs for each in drafted] == [each.logprobs for each in plain]
        before = held_copies(source)
        weights = MtpTrainer(live).weights()
        live.update_draft({name: 2 * each for name, each in weights.items() if each.dim() == 2})
        after = held_copies(source)
        changed = {name for name in copied if not torch.equal(before[name], after[name])}
        assert changed == copied - {"head"}
        doubled = 2 * as_torch(numbers_of(live.model.head))
        live.update_weights({"lm_head.weight": doubled}, complete=False, blocking=True)
        live.generate(prompts(1), LONG)
        assert not torch.equal(held_copies(source)["head"], after["head"])


def held_copies(source: MtpDrafts) -> dict[str, Tensor]:
    assert source._copies is not None
    params = source._copies.params.items()
    return {
        name: as_torch(each.read(0, each.rows)).clone() for name, each in params if form_of(each)
    }


def test_mtp_update_rejects_foreign_tensors(model: MtpModel) -> None:
    with built(model.folder) as engine:
        trainer = MtpTrainer(engine)
        weights = trainer.weights()
        name = next(iter(weights))
        with pytest.raises(ConfigError, match="is unknown"):
            engine.update_draft({name: weights[name] + 1, "lm_head.weight": torch.zeros(2)})
        with pytest.raises(ConfigError, match="must have shape"):
            engine.update_draft({name: weights[name][:1]})
        with pytest.raises(ConfigError, match="int8; send it unquantized"):
            engine.update_draft({name: weights[name].to(torch.int8)})
        assert all(torch.equal(weights[each], each_of(engine)[each]) for each in weights)
        engine.update_draft({each: weights[each] + 1 for each in weights})
        assert all(torch.equal(weights[each] + 1, each_of(engine)[each]) for each in weights)


def each_of(engine: InferenceEngine) -> dict[str, Tensor]:
    return MtpTrainer(engine).weights()


@pytest.mark.parametrize("family", ["glm4-moe", "deepseek-v3"])
def test_mtp_trainer_rejects_other_layers(tmp_path: Path, family: str) -> None:
    model = MtpModel(tmp_path, FAMILIES[family])
    with built(model.folder) as engine, pytest.raises(ConfigError, match="does not support"):
        MtpTrainer(engine)


def test_mtp_trainer_rejects_missing_layers_and_data(model: MtpModel, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "llama", "llama")
    with (
        built(folder, draft_model=None) as engine,
        pytest.raises(ConfigError, match="draft_model='mtp'"),
    ):
        MtpTrainer(engine)
    with built(model.folder) as engine:
        with pytest.raises(ConfigError, match="places=0"):
            MtpTrainer(engine, places=0)
        with pytest.raises(ConfigError, match="learned_tokens must be ids from 0 to"):
            MtpTrainer(engine, learned_tokens=[3, VOCAB])
        with pytest.raises(InvalidRequest, match="no samples with a completion"):
            MtpTrainer(engine).train([])
