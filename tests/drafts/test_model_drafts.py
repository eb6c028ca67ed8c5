"""Drafts by a model: the policy with fewer layers, or another model with a separate cache."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference import ConfigError, EngineConfig, Grammar, InferenceEngine, SamplingParams
from nano_inference.drafts import model as model_drafts
from nano_inference.drafts.drafter import Drafter
from nano_inference.drafts.model import ModelDrafts, spread_layers
from nano_inference.drafts.source import NO_GUESS, Guess
from nano_inference.errors import ModelLoadError
from nano_inference.types import SpeculationStats, TrainingSample
from tests.checkpoints.quantisers import write_quantised
from tests.models.tiny import llama_config, llama_weights, tiny_llama, tiny_model
from tests.structured.vocabularies import with_tokenizer
from tests.weights.weight_cases import NEW

PROMPTS = [[5, 9, 4, 33, 9, 4, 70, 11], [7] * 3, [3 + each for each in range(33)]]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"top_k": 20, "top_p": 0.9, "temperature": 1.3},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 1.4},
    "greedy": {"temperature": 0.0},
    "bans": {"min_tokens": 20, "allowed_token_ids": [2, *range(3, 60)]},
    "grammar": {"grammar": Grammar.regex("(ab|ba|abc){3,9}[0-9]{2,8}"), "ignore_eos": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another, narrower model of the same vocabulary."""
    return tiny_llama(
        tmp_path_factory.mktemp("other"), seed=3, hidden=32, num_heads=2, num_kv_heads=1, layers=1
    )


def engine_of(model: Path, **options: Any) -> InferenceEngine:
    same: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_cache_memory": 2**20}
    engine = InferenceEngine(EngineConfig(str(model), **(same | options)))
    if engine.drafter is not None:
        engine.drafter.costs = None  # as many drafts as possible
    return engine


def bits(samples: list[TrainingSample]) -> list[Any]:
    return [(each.completion_tokens, each.logprobs, each.finish_reason) for each in samples]


def drafts_of(engine: InferenceEngine, name: str) -> tuple[int, int]:
    """Return the numbers of computed and of accepted drafts."""
    stats = engine.stats().speculation
    assert isinstance(stats, SpeculationStats)
    return sum(stats.drafted.get(name, ())), sum(stats.accepted.get(name, ()))


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("case", CASES)
def test_policy_drafts_for_itself(model: Path, case: str, block_size: int) -> None:
    """With all its layers nearly every draft is right under any parameters."""
    options = {"max_tokens": 40, "ignore_eos": True, "seed": 5} | CASES[case]
    params = SamplingParams(**options)
    with engine_of(model, block_size=block_size) as engine:
        plain = engine.generate(PROMPTS, params, 2)
        steps = engine.stats().num_steps
    drafting = {"draft_model": "self", "draft_layers": 2, "max_drafts": 3}
    with engine_of(model, block_size=block_size, **drafting) as engine:
        assert bits(engine.generate(PROMPTS, params, 2)) == bits(plain)
        drafted, drawn = drafts_of(engine, "self")
        assert drafted > 20
        # blocks after a group's last common token are shared at first
        assert drawn >= 0.85 * drafted
        assert engine.stats().num_steps < 0.6 * steps
        engine.loop.check()


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_draft_model_equal_to_the_policy_is_always_right(
    model: Path, cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model also computes prompts, long ones over several calls."""
    monkeypatch.setattr(model_drafts, "MOST_BEHIND", 16)
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=5)
    tight = {"kv_cache_memory": 2**17, "cache_type": cache_type, "block_size": 4}
    with engine_of(model, **tight) as engine:
        plain = engine.generate(PROMPTS, params, 2)
    with engine_of(model, **tight, draft_model=str(model), max_drafts=3) as engine:
        assert bits(engine.generate(PROMPTS, params, 2)) == bits(plain)
        drafted, drawn = drafts_of(engine, "model")
        assert drawn > 0.8 * drafted > 30
        assert bits(engine.generate(PROMPTS, params, 2)) == bits(plain)  # on cached prefixes
        engine.loop.check()


@pytest.mark.thorough
def test_preempted_sequences_are_drafted_again(model: Path) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=5)
    tight = {"kv_cache_memory": 2**17, "block_size": 4}
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS, params, 3)
    for drafting in ({"draft_model": "self", "draft_layers": 1}, {"draft_model": str(model)}):
        with engine_of(model, **tight, **drafting) as engine:
            assert bits(engine.generate(PROMPTS, params, 3)) == bits(plain)
            assert engine.stats().num_preemptions > 0


def test_unrelated_draft_model_changes_no_bit(model: Path, other: Path) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=5)
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS, params, 2)
        a_token = engine.memory_budget.bytes_per_token
    with engine_of(model, draft_model=str(other), speculation="suffix") as engine:
        assert bits(engine.generate(PROMPTS, params, 2)) == bits(plain)
        assert drafts_of(engine, "model")[0] > 0
        assert engine.memory_budget.bytes_per_token > a_token  # its cache is counted
        assert engine.stats().speculation.sources[-1] == "model"  # type: ignore[union-attr]


def test_draft_model_recomputes_after_wrong_drafts(
    model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts equal those of a model that reads the text for the first time, also after steps
    without drafts.
    """
    asked = compared = 0
    with engine_of(model, draft_model=str(other), max_drafts=4) as engine:
        assert isinstance(engine.drafter, Drafter)
        source = engine.drafter.model
        assert isinstance(source, ModelDrafts)
        propose = source.propose

        def checked(seqs: Any, most: int) -> Any:
            nonlocal asked, compared
            asked += 1
            if asked % 3:
                return [NO_GUESS] * len(seqs)
            guesses = propose(seqs, most)
            assert source._computed is not None
            source._computed.clear()
            assert propose(seqs, most) == guesses
            compared += sum(len(guess.token_ids) for guess in guesses)
            return guesses

        monkeypatch.setattr(source, "propose", checked)
        engine.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True, seed=5))
        drafted, drawn = drafts_of(engine, "model")
        assert drawn < drafted
    assert compared > 60


def test_drafts_follow_updated_weights(model: Path) -> None:
    """No extra update is needed: the layers belong to the policy."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=5)
    with engine_of(model, draft_model="self", draft_layers=2) as engine:
        engine.update_weights(NEW, blocking=True)
        drafted, drawn = drafts_of(engine, "self")
        engine.generate(PROMPTS, params)
        now = drafts_of(engine, "self")
        assert now[1] - drawn > 0.85 * (now[0] - drafted) > 20


@pytest.mark.thorough(cases=["reference-int8", "reference-int8-32"])
@pytest.mark.parametrize("how", ["int8", "int8-32"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_quantized_policy_drafts_and_follows_updates(model: Path, backend: str, how: str) -> None:
    """The drafts use the samples' noise, so most of them are accepted."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=5)
    with engine_of(model, backend=backend) as engine:
        plain = [engine.generate(PROMPTS, params, 2)]
        engine.update_weights(NEW, blocking=True)
        plain.append(engine.generate(PROMPTS, params, 2))
    options = {"draft_model": "self", "draft_quantization": how, "max_drafts": 3}
    with engine_of(model, backend=backend, **options) as engine:
        for number, expected in enumerate(plain):
            if number:
                engine.update_weights(NEW, blocking=True)
            before = drafts_of(engine, "self")
            assert bits(engine.generate(PROMPTS, params, 2)) == bits(expected)
            drafted, drawn = (
                now - then for now, then in zip(drafts_of(engine, "self"), before, strict=True)
            )
            assert drawn > 0.75 * drafted > 30
        engine.loop.check()


@pytest.mark.thorough(cases=["qwen3-moe"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3-moe"])
def test_draft_model_supports_windows_and_experts(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path, family)
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=5)
    with engine_of(folder, block_size=4) as engine:
        plain = engine.generate(PROMPTS, params, 2)
    for drafting in ({"draft_model": "self", "draft_layers": 2}, {"draft_model": str(folder)}):
        with engine_of(folder, block_size=4, **drafting) as engine:
            assert bits(engine.generate(PROMPTS, params, 2)) == bits(plain)
            drafted, drawn = drafts_of(engine, "self" if "draft_layers" in drafting else "model")
            assert drafted > 20
            assert drawn > 0.2 * drafted


def test_failing_draft_model_is_switched_off(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=5)
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS, params)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no")

    with engine_of(model, draft_model=str(model)) as engine:
        assert isinstance(engine.drafter, Drafter)
        assert isinstance(engine.drafter.model, ModelDrafts)
        monkeypatch.setattr(engine.drafter.model.model, "forward", fail)
        with caplog.at_level(logging.ERROR):
            assert bits(engine.generate(PROMPTS, params)) == bits(plain)
        assert engine.drafter.model is None
        assert "disabled draft source 'model': raised RuntimeError('no')" in caplog.text


def test_non_finite_logits_draft_nothing(model: Path) -> None:
    """A model with NaN weights drafts nothing."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=5)
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS, params)
    with engine_of(model, draft_model=str(model)) as engine:
        assert isinstance(engine.drafter, Drafter)
        assert isinstance(engine.drafter.model, ModelDrafts)
        for name, param in engine.drafter.model.model.params.items():
            if "norm" in name:
                param.fill_(torch.nan)
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)
        assert drafts_of(engine, "model") == (0, 0)


class Timed:
    """Right or wrong drafts that take a fixed time."""

    name = "timed"

    def __init__(self, token_id: int, seconds: float) -> None:
        self.token_id, self._seconds = token_id, seconds
        self.asked: list[int] = []

    def seconds(self, num_seqs: int) -> float:
        return self._seconds

    def propose(self, seqs: Any, most: int) -> Any:
        self.asked.append(most)
        return [Guess([self.token_id] * most, [0] * most) for _ in seqs]


@pytest.mark.parametrize(
    ("seconds", "token_id", "enough"),
    [
        (0.01, 0, lambda asked: np.mean(asked[-20:]) > 3),
        (0.6, 0, lambda asked: 0 < np.mean(asked[-20:]) < 3),
        (3.0, 0, lambda asked: not asked),
        # the source is retried now and then in case it has improved
        (0.6, 1, lambda asked: 2 < len(asked) < 40),
    ],
)
def test_draft_model_runs_only_if_it_pays(
    seconds: float, token_id: int, enough: Callable[[list[int]], bool]
) -> None:
    from tests.drafts.test_drafter import TILES, draw, live

    model: Any = Timed(token_id, seconds)
    draw(Drafter([], TILES, 4, model), live(), [0] * 9, 200)
    assert enough(model.asked)


def test_text_drafts_if_the_model_has_none() -> None:
    from tests.drafts.test_drafter import FREE, Always, draw, live

    class Silent(Timed):
        def propose(self, seqs: Any, most: int) -> Any:
            return [NO_GUESS] * len(seqs)

    model: Any = Silent(0, 0.0)
    assert draw(Drafter([Always([7, 8])], FREE, 2, model), live(), [0]) == [(7, 8)]


def test_quantized_model_drafts(model: Path, tmp_path: Path) -> None:
    config = llama_config()
    write_quantised(tmp_path, "fp8-blocks", config, llama_weights(config))
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=5)
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS, params)
    with engine_of(model, draft_model=str(tmp_path)) as engine:
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)
        assert drafts_of(engine, "model")[1] > 0


def test_draft_layers_are_spread_evenly() -> None:
    assert spread_layers(30, 1) == (0,)
    assert spread_layers(5, 2) == (0, 4)
    assert spread_layers(7, 4) == (0, 2, 4, 6)
    assert spread_layers(30, 30) == tuple(range(30))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"draft_model": "self"}, "needs draft_layers or draft_quantization"),
        ({"draft_layers": 3}, "needs draft_model='self'"),
        ({"draft_quantization": "int8"}, "needs draft_model='self' or draft_model='mtp'"),
        (
            {"draft_model": "self", "draft_quantization": "file"},
            "codes are made from plain weights",
        ),
        (
            {"draft_model": "self", "draft_quantization": "int8", "quantization": "int4"},
            "quantizes plain weights",
        ),
        ({"draft_model": "self", "draft_layers": 3}, "exceeds the 2 layers"),
        ({"draft_model": "self", "draft_layers": 1, "tensor_parallel": 2}, "runs on one rank"),
        ({"draft_model": "nowhere"}, "nowhere"),
    ],
)
def test_draft_config_rejects_unusable_models(
    model: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=reason):
        engine_of(model, **options)


def test_draft_model_without_kernels_is_rejected(model: Path, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, hidden=32)
    with pytest.raises(
        ConfigError, match=r"draft_model=.* cannot run with this policy: .*head_dim.*got 8"
    ):
        engine_of(model, draft_model=str(folder))
    engine_of(model, backend="reference", draft_model=str(folder)).shutdown()


def test_draft_model_of_another_vocabulary_is_rejected(model: Path, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, vocab_size=500)
    with pytest.raises(ConfigError, match=r"draft_model=.* has 500 tokens in its vocabulary"):
        engine_of(model, draft_model=str(folder))
