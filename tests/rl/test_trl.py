"""The rollout function for TRL's trainer, on a fake trainer: groups, order, weights, sampling,
errors.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import (
    ConfigError,
    EngineConfig,
    EngineDead,
    InferenceEngine,
    InvalidRequest,
    RequestTooLarge,
    SamplingParams,
    WeightUpdateError,
)
from nano_inference.rl.trl import RolloutFunction, group_by_prompt, sampling_params
from tests.depth import at_depth
from tests.models.tiny import tiny_llama
from tests.rl.training import build
from tests.rl.trl_trainer import DistributedType, FakeTrainer

PROMPTS = ["What?", "Why", "What?", "How many", "Why", "What?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=3, std=0.1, tie=True)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[InferenceEngine]:
    with build(folder) as built:
        yield built


@pytest.fixture(scope="module")
def trainer(folder: Path) -> FakeTrainer:
    return FakeTrainer(folder)


def largest_difference(trainer: FakeTrainer, output: dict[str, Any]) -> float:
    columns = (output["prompt_ids"], output["completion_ids"], output["logprobs"])
    return max(
        float((trainer.logprobs(prompt, completion) - torch.tensor(logprobs)).abs().max())
        for prompt, completion, logprobs in zip(*columns, strict=True)
    )


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=12))
def test_groups_follow_prompts(prompts: list[list[int]]) -> None:
    groups = group_by_prompt(prompts)
    rebuilt = {place: list(group.token_ids) for group in groups for place in group.places}
    assert [rebuilt[place] for place in range(len(prompts))] == prompts
    assert sum(len(group.places) for group in groups) == len(prompts)
    assert len({group.token_ids for group in groups}) == len(groups)
    assert all(group.places == tuple(sorted(group.places)) for group in groups)
    assert [group.places[0] for group in groups] == sorted(group.places[0] for group in groups)


@pytest.mark.thorough
@settings(max_examples=at_depth(15), deadline=None)
@given(
    words=st.lists(st.sampled_from(["a", "be", "sea", "deed"]), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_entries_get_one_completion_and_share_prompt_compute(
    engine: InferenceEngine, trainer: FakeTrainer, words: list[str], seed: int
) -> None:
    trainer.args.seed = seed
    before = engine.stats()
    output = RolloutFunction(engine, extras=("sample_index",))(words, trainer)
    after = engine.stats()
    assert output["prompt_ids"] == [list(map(ord, word)) for word in words]
    assert after.prompt_tokens_computed - before.prompt_tokens_computed == sum(map(len, set(words)))
    for completion, logprobs in zip(output["completion_ids"], output["logprobs"], strict=True):
        assert 1 <= len(completion) == len(logprobs) <= trainer.max_completion_length
        assert (completion[-1] == 2) or len(completion) == trainer.max_completion_length
    assert largest_difference(trainer, output) < 1e-4
    assert output["sample_index"] == [words[:place].count(word) for place, word in enumerate(words)]
    # samples of a group differ
    assert len({tuple(ids) for ids in output["completion_ids"]}) > len(words) // 3


def test_weights_sync_only_when_the_trainer_changes(folder: Path, engine: InferenceEngine) -> None:
    trainer, rollout = FakeTrainer(folder), RolloutFunction(engine)
    first = rollout(PROMPTS, trainer)["weight_version"][0]
    trainer.model.eval()
    assert rollout(PROMPTS[:2], trainer)["weight_version"] == [first, first]
    assert not rollout.sync(trainer)

    # the last write: load_best_model_at_end, a callback
    for change in (trainer.step, trainer.step, trainer.write):
        change()
        output = rollout(PROMPTS, trainer)
        first += 1
        assert output["weight_version"] == [first] * len(PROMPTS)
        assert largest_difference(trainer, output) < 1e-4
        assert not rollout.sync(trainer)

    engine.update_weights({"model.norm.weight": torch.ones(64)}, blocking=True)  # another writer
    assert largest_difference(trainer, rollout(PROMPTS, trainer)) < 1e-4


def test_mismatched_weights_are_rejected_and_the_next_accepted(
    folder: Path, engine: InferenceEngine
) -> None:
    trainer, rollout = FakeTrainer(folder), RolloutFunction(engine)
    rollout(["a"], trainer)
    version, norm = engine.get_weight_version(), trainer.model.model.norm.weight
    before = norm.detach().clone()
    trainer.step()
    with torch.no_grad():
        norm[5] = math.nan
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight"):
        rollout(["a"], trainer)
    assert engine.get_weight_version() == version
    with torch.no_grad():
        norm.copy_(before)
    assert largest_difference(trainer, rollout(["a", "a"], trainer)) < 1e-4


@pytest.mark.thorough
def test_draws_depend_on_seed_step_process_and_turn(folder: Path) -> None:
    def rollouts(**changes: Any) -> list[Any]:
        trainer = FakeTrainer(
            folder, **{name: value for name, value in changes.items() if name == "seed"}
        )
        trainer.accelerator.process_index = changes.get("process_index", 0)
        drawn: list[Any] = []
        with RolloutFunction(build(folder), extras=("seed",)) as rollout:
            for change in (None, None, trainer.step, trainer.model.eval):
                if change is not None:
                    torch.manual_seed(0)
                    change()
                drawn.append(rollout(PROMPTS, trainer))
            rollout.engine.shutdown()
        seeds = [
            (prompt, seed)
            for each in drawn
            for prompt, seed in zip(PROMPTS, each["seed"], strict=True)
        ]
        # one per group
        assert len(set(seeds)) == len({seed for _, seed in seeds}) == len(drawn) * len(set(PROMPTS))
        return [each["completion_ids"] for each in drawn]

    first = rollouts()
    assert rollouts() == first
    everything = [*first, *rollouts(seed=8), *rollouts(process_index=1)]
    assert all(a != b for place, a in enumerate(everything) for b in everything[:place])


def test_chats_use_the_template_of_the_trainer(folder: Path, engine: InferenceEngine) -> None:
    trainer = FakeTrainer(folder, chat_template_kwargs={"enable_thinking": True})
    chat = [{"role": "user", "content": "Hi"}]
    output = RolloutFunction(engine)([chat, chat], trainer)
    assert output["prompt_ids"] == [[11, *map(ord, "Hi"), 12, 13]] * 2
    picture = [
        {
            "role": "user",
            "content": [{"type": "image", "image": None}, {"type": "text", "text": "Hi"}],
        }
    ]
    with pytest.raises(InvalidRequest, match="'image'"):
        RolloutFunction(engine)([picture], trainer)


def test_stop_tokens_come_from_the_trainer(folder: Path, engine: InferenceEngine) -> None:
    ends = list(range(100, 180))
    trainer = FakeTrainer(folder, eos_token_ids=ends, max_completion_length=60)
    output = RolloutFunction(engine)(PROMPTS, trainer)
    for completion, reason in zip(output["completion_ids"], output["finish_reason"], strict=True):
        assert not set(completion[:-1]) & set(ends)
        assert (completion[-1] in ends) == (reason == "stop")
    assert "stop" in output["finish_reason"]


def test_sampling_params_come_from_the_trainer(folder: Path) -> None:
    kwargs = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "stop_strings": ("x",),
        "eos_token_id": [4, 5],
        "presence_penalty": 0.5,
        "top_k": None,
    }
    trainer = FakeTrainer(
        folder,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        generation_kwargs=kwargs,
    )
    assert sampling_params(trainer, ["raw_logprobs", "seed"]) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ("x",),
        "stop_token_ids": {4, 5},
        "ignore_eos": True,
        "raw_logprobs": True,
    }
    trainer.args.generation_kwargs = {"do_sample": False, "temperature": 0.3, "ignore_eos": True}
    greedy = sampling_params(trainer)
    assert greedy["temperature"] == 0
    assert greedy["stop_token_ids"] == frozenset()
    for unknown, said in (({"num_beams": 4}, "'num_beams'"), ({"seed": 1}, r"args\.seed")):
        trainer.args.generation_kwargs = unknown
        with pytest.raises(ConfigError, match=said):
            sampling_params(trainer)


def test_logprobs_match_the_trainer_under_filters(folder: Path, engine: InferenceEngine) -> None:
    trainer = FakeTrainer(folder, temperature=1.3, top_k=7, top_p=0.9)
    output = RolloutFunction(engine, extras=("log_kept_mass", "raw_logprobs"))(PROMPTS, trainer)
    assert min(min(kept) for kept in output["log_kept_mass"]) < -0.5
    assert largest_difference(trainer, output) < 1e-4
    trainer.temperature = 1.0
    raw = output | {"logprobs": output["raw_logprobs"]}
    assert largest_difference(trainer, raw) < 1e-4


def test_completions_are_taken_in_finish_order(folder: Path, engine: InferenceEngine) -> None:
    trainer = FakeTrainer(folder, eos_token_ids=list(range(3, 33)), max_completion_length=80)
    before = engine.stats().completion_tokens
    output = RolloutFunction(engine, oversample=8, extras=("sample_index", "finish_reason"))(
        PROMPTS, trainer
    )
    assert set(output["finish_reason"]) == {"stop"}
    assert largest_difference(trainer, output) < 1e-4
    longest = max(map(len, output["completion_ids"]))
    assert max(output["sample_index"]) > 2
    everything = RolloutFunction(engine, extras=())
    all_of_them = everything([*PROMPTS, *["What?", "Why", "How many"] * 8], trainer)[
        "completion_ids"
    ]
    assert max(map(len, all_of_them)) > longest
    assert engine.stats().completion_tokens - before < 2 * sum(map(len, all_of_them))
    taken = {tuple(ids) for ids in output["completion_ids"]}
    assert taken <= {tuple(ids) for ids in all_of_them}  # the selection changes no token
    with pytest.raises(ConfigError, match="oversample=-1"):
        RolloutFunction(engine, oversample=-1)


def test_mismatch_metrics_match_trl(folder: Path, engine: InferenceEngine) -> None:
    trainer = FakeTrainer(folder)
    # more than a batch, of several lengths
    prompts = ["A longer prompt", "b", "b", "And one more", "c"]
    output = RolloutFunction(engine, log_mismatch=True)(prompts, trainer)
    figures = trainer._metrics["train"]
    mean, largest = (
        figures[f"sampling/sampling_logp_difference/{each}"][0] for each in ("mean", "max")
    )
    assert 0 < mean < largest < 1e-4
    assert largest_difference(trainer, output) < 1e-4
    ratios = [
        figures[f"sampling/importance_sampling_ratio/{each}"][0] for each in ("min", "mean", "max")
    ]
    assert ratios == sorted(ratios)
    assert ratios == pytest.approx([1, 1, 1], abs=1e-4)
    assert figures["rollout/generate_seconds"][0] > 0

    trainer.model.eval()
    rollout = RolloutFunction(engine, log_mismatch=True)
    rollout.sync = lambda _: False  # pyright: ignore[reportAttributeAccessIssue]
    trainer.write()
    rollout(prompts, trainer)
    assert trainer._metrics["eval"]["sampling/sampling_logp_difference/max"][0] > 1e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: setattr(t.accelerator, "distributed_type", DistributedType.FSDP), "FSDP"),
        (
            lambda t: setattr(t.accelerator, "distributed_type", DistributedType.DEEPSPEED),
            "DEEPSPEED",
        ),
        (lambda t: setattr(t, "tools", [print]), "tools"),
        (lambda t: setattr(t.args, "cache_implementation", "static"), "'static'"),
        (lambda t: setattr(t.model, "is_loaded_in_4bit", True), "quantized"),
        (lambda t: setattr(t.model, "peft_config", {"a": SimpleNamespace(peft_type="IA3")}), "IA3"),
        (lambda t: setattr(t, "max_completion_length", 10_000), "max_model_len"),
    ],
)
def test_unsupported_trainer_options_are_rejected_by_name(
    folder: Path, engine: InferenceEngine, change: Any, said: str
) -> None:
    trainer = FakeTrainer(folder)
    change(trainer)
    with pytest.raises((ConfigError, RequestTooLarge), match=said):
        RolloutFunction(engine)(["a"], trainer)


def test_processes_with_whole_models_are_supported(folder: Path, engine: InferenceEngine) -> None:
    trainer = FakeTrainer(folder)
    trainer.accelerator.distributed_type = DistributedType.MULTI_CPU
    assert len(RolloutFunction(engine)(["a"], trainer)["completion_ids"]) == 1


def test_shutdown_ends_only_an_engine_built_here(folder: Path, engine: InferenceEngine) -> None:
    config = EngineConfig(str(folder), dtype="float32", kv_cache_memory=2**22)
    with RolloutFunction(config, sleep=True) as rollout:
        trainer = FakeTrainer(folder)
        for _ in range(2):
            assert largest_difference(trainer, rollout(PROMPTS, trainer)) < 1e-4
            assert rollout.engine.is_paused()
            trainer.step()
    with pytest.raises(EngineDead):
        rollout(["a"], trainer)
    with RolloutFunction(engine):
        pass
    assert engine.generate([[5]], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match="'colour', 'logprobs'"):
        RolloutFunction(engine, extras=("seed", "logprobs", "colour"))
