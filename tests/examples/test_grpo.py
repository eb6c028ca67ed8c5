"""The GRPO loop on a tiny model: it learns, and only recipe, task and model determine its last
checkpoint.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from examples.grpo.largest import exact_match, largest_number
from examples.grpo.order import ORDER, order, right_fields
from examples.same_hash import CONFIG, Run, whole_run
from nano_inference import Grammar, TrainingSample
from nano_inference.drafts import drafter
from nano_inference.drafts.costs import StepCosts
from nano_inference.engine import engine
from nano_inference.rl import PolicyModel
from nano_train.config import RunConfig, read_config
from nano_train.curves import Point, plot
from nano_train.hashes import first_difference
from nano_train.losses import by_group
from nano_train.questions import Question, Task
from nano_train.records import LogprobMismatch
from tests.models.tiny import tiny_llama
from tests.structured.vocabularies import with_tokenizer

ROOT = Path(__file__).parents[2]
JSON_RUN = ROOT / "benchmarks" / "results" / "grpo-json.json"

BLOCK_BYTES = 2 * 2 * 2 * 16 * 2  # per token: 2 layers, keys and values, 2 heads of 16 in bfloat16
ROOMY: dict[str, Any] = {"lookahead": 0, "num_threads": 2, "kv_cache_memory": 2**22}
TIGHT: dict[str, Any] = {
    "max_batch_size": 5,
    "max_chunk_tokens": 3,
    "block_size": 4,
    "cache_type": "radix",
    "kv_cache_memory": 9 * 4 * BLOCK_BYTES,
    "lookahead": 1,
    "num_threads": 1,
}


def low_ids(sample: TrainingSample, _: Any) -> float:
    """Return the share of tokens in the lower half of the vocabulary; above half only after
    learning.
    """
    return sum(token < 150 for token in sample.completion_tokens) / len(sample.completion_tokens)


def low_id_task() -> Task:
    questions = [Question([10 + number, 200, 30 + 7 * number % 50, 5]) for number in range(40)]
    return Task(questions[8:], questions[:8], low_ids)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tiny_llama(tmp_path / "model", dtype=torch.bfloat16))


DIGITS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


def small_number(sample: TrainingSample, _: Any) -> float:
    """Reward JSON that matches the schema, smaller numbers more."""
    if sample.finish_reason != "stop":
        return 0.0
    jsonschema.validate(answer := json.loads(sample.text or ""), DIGITS)
    return 1 - answer["n"] / 99


def json_task() -> Task:
    questions = [Question(f"{word} =") for word in ("a", "b", "c", "d", "e", "f")]
    grammar = Grammar.json_schema(DIGITS, whitespace="")
    return Task(questions[2:], questions[:2], small_number, grammar)


def config_of(model: str, engine: dict[str, Any], **changes: Any) -> RunConfig:
    """Return a run of four steps. The task is passed to `whole_run`, so its names are not read."""
    values: dict[str, Any] = {
        "model": model,
        "steps": 4,
        "test_every": 2,
        "reference": model,
        "task": {"train": "unread", "reward": "unread", "prompts": 3, "samples": 6},
        "sampling": {"max_tokens": 8},
        "optimizer": {"learning_rate": 2e-3},
        "loss": {"aggregation": "token"},
        "engine": {"dtype": "bfloat16", "device": "cpu", "max_model_len": 32, **engine},
    }
    return RunConfig.model_validate(values | changes)


def run(model: str, engine: dict[str, Any], task: Task | None = None, **changes: Any) -> Run:
    before = torch.get_num_threads()
    if task is not None:
        changes = {"reference": None, "sampling": {"max_tokens": 9}, **changes}
    try:
        return whole_run(config_of(model, engine, **changes), task or low_id_task())
    finally:
        torch.set_num_threads(before)


@pytest.mark.thorough
def test_runs_under_different_options_reach_the_same_checkpoint(model: str) -> None:
    roomy, tight = run(model, ROOMY), run(model, TIGHT)
    assert tight.preemptions > 0
    assert tight.engine_steps > roomy.engine_steps
    assert tight.sha256 == roomy.sha256
    untimed = [
        [dataclasses.replace(step, seconds=0.0) for step in done.steps] for done in (roomy, tight)
    ]
    assert untimed[0] == untimed[1]
    other = run(model, ROOMY, seed=1)
    assert other.sha256 != roomy.sha256  # so the hash covers trained values


@pytest.mark.thorough
def test_adapter_runs_reach_the_same_checkpoint(model: str) -> None:
    lora = {"lora": {"rank": 4, "alpha": 32.0}, "optimizer": {"learning_rate": 0.02}}
    roomy, tight = (run(model, options, steps=8, **lora) for options in (ROOMY, TIGHT))
    assert tight.preemptions > 0
    assert tight.sha256 == roomy.sha256
    assert [each.reward for each in tight.steps] == [each.reward for each in roomy.steps]
    first, last = (step.held_out or 0 for step in (roomy.steps[0], roomy.steps[-1]))
    assert last > first + 0.1  # the policy learns
    assert all(step.mismatch == 0 for step in roomy.steps)


@pytest.mark.thorough
def test_history_drafts_do_not_change_the_checkpoint(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = StepCosts((1, 64), (1.0, 1.0))  # for as many drafts as possible
    monkeypatch.setattr(engine, "measure_costs", lambda *_: free)
    monkeypatch.setattr(drafter, "HOPELESS", 0.0)  # a tiny model has none otherwise
    plain = run(model, ROOMY, steps=8)
    drafted = run(model, {**ROOMY, "speculation": "history"}, steps=8)
    assert plain.drafts == 0
    assert drafted.drafts > 100
    assert drafted.sha256 == plain.sha256
    assert [step.reward for step in drafted.steps] == [step.reward for step in plain.steps]


@pytest.mark.slow
def test_smollm2_with_history_drafts_reaches_the_same_checkpoint() -> None:
    changes = {"steps": 3, "task.prompts": 2, "task.samples": 4, "test_every": 1}
    engine = {"engine.dtype": "float32", "engine.max_model_len": 64}
    runs = [
        whole_run(
            read_config(CONFIG, {**changes, **engine, "engine.speculation": mode}),
            largest_number(0, num_held_out=8),
        )
        for mode in ("none", "history")
    ]
    assert runs[1].drafts > 0 == runs[0].drafts
    assert runs[0].sha256 == runs[1].sha256


@pytest.mark.thorough
def test_reward_rises_also_on_held_out_prompts(model: str) -> None:
    steps = run(model, ROOMY, steps=41, test_every=8).steps
    assert steps[0].kl == 0.0
    assert (steps[-1].kl or 0.0) > 0.0
    assert all(step.mismatch == 0.0 for step in steps)
    assert (
        sum(step.reward or 0.0 for step in steps[-5:]) / 5
        > sum(step.reward or 0.0 for step in steps[:5]) / 5 + 0.1
    )
    assert [step.step for step in steps if step.held_out is not None] == [0, 8, 16, 24, 32, 40]


@pytest.mark.thorough
def test_grammar_run_is_reproducible_and_its_reward_rises(model: str) -> None:
    with_tokenizer(Path(model))
    roomy, tight = (run(model, options, json_task(), steps=12) for options in (ROOMY, TIGHT))
    assert tight.preemptions > 0
    assert tight.sha256 == roomy.sha256
    assert all(step.mismatch == 0.0 and step.kl is None for step in roomy.steps)
    rewards = [step.reward or 0.0 for step in roomy.steps]
    assert sum(rewards[-4:]) > sum(rewards[:4])


def test_differing_bit_ends_the_run(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = PolicyModel.logprobs

    def off(*args: Any, **options: Any) -> list[torch.Tensor]:
        values = logprobs(*args, **options)
        values[3] = values[3].detach().clone()
        values[3][2] = torch.nextafter(values[3][2], torch.tensor(0.0))
        return values

    monkeypatch.setattr(PolicyModel, "logprobs", off)
    with pytest.raises(LogprobMismatch, match=r"step 0, sample 3, position 6, token \d+: engine"):
        run(model, ROOMY)
    assert run(model, ROOMY, require_equal_logprobs=False).steps[0].mismatch != 0


def test_signs_of_zero_differ() -> None:
    sample = TrainingSample((1, 2), (7, 8), (-1.5, 0.0), None, 0, "stop")
    assert first_difference([sample], [torch.tensor([-1.5, 0.0])]) is None
    said = first_difference([sample], [torch.tensor([-1.5, -0.0])])
    assert said == "sample 0, position 3, token 8: engine 0.0, trainer -0.0"


def test_group_advantages_are_normalized() -> None:
    assert by_group([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]
    assert by_group([1.0, 1.0]) == [0.0, 0.0]


@pytest.mark.thorough
def test_questions_match_their_answers() -> None:
    task = largest_number(seed=3)
    numbers = [
        tuple(sorted(prompt.split("\n")[1].rstrip("?").replace(" or", ",").split(", ")))
        for prompt, _ in task.train
    ]
    held_out = [
        tuple(sorted(p.split("\n")[1].rstrip("?").replace(" or", ",").split(", ")))
        for p, _ in task.held_out
    ]
    assert len(set(numbers) | set(held_out)) == len(numbers) + len(held_out) == 117_480
    assert all(
        max(three) == answer for three, (_, answer) in zip(held_out, task.held_out, strict=True)
    )


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (" 52", 1.0),
        (" 52.", 1.0),
        ("52\n", 1.0),
        (" 52 or 17", 0.0),
        (" 5", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_reward_is_only_for_the_bare_answer(text: str | None, reward: float) -> None:
    sample = TrainingSample((1,), (2,), (0.0,), None, 0, "stop", text=text)
    assert exact_match(sample, "52") == reward


def test_order_fields_are_rewarded() -> None:
    task = order(seed=3)
    pairs = {
        frozenset(re.findall(r"wants (.*?)\.", prompt))
        for prompt, _ in [*task.train, *task.held_out]
    }
    assert len(pairs) == len(task.train) + len(task.held_out) == 225 * 224 // 2
    for prompt, answer in task.held_out:
        jsonschema.validate(right := json.loads(answer), ORDER)
        who = prompt.split("\n")[1].removesuffix("'s order: ")
        assert f"{who} wants" in prompt
        assert right["colour"] in prompt.split(f"{who} wants")[1].split(".")[0]
    _, answer = task.held_out[0]
    wrong = json.loads(answer) | {"count": 10}
    for text, ended, worth in (
        (answer, "stop", 1.0),
        (json.dumps(wrong), "stop", 2 / 3),
        (answer[:-1], "length", 0.0),
    ):
        sample = TrainingSample((1,), (2,), (0.0,), None, 0, ended, text=text)
        assert right_fields(sample, answer) == pytest.approx(worth)


def test_documented_run_never_differed_and_learned(tmp_path: Path) -> None:
    report = json.loads(JSON_RUN.read_text())
    steps = [Point(**row) for row in report["steps"]]
    assert len(steps) >= 20
    assert all(step.tokens and step.mismatch == 0.0 for step in steps)
    tested = [step.held_out for step in steps if step.held_out is not None]
    assert tested[-1] > tested[0] + 0.2
    pytest.importorskip("matplotlib")
    plot(steps, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_json_answers_run_for_three_steps(tmp_path: Path) -> None:
    file = CONFIG.with_name("json.toml")
    command = [sys.executable, "-W", "ignore", "-m", "nano_inference", "train", str(file)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [*command, "--set", "steps=3", "--out", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [step["mismatch"] for step in steps] == [0.0] * 3
    assert all(step["tokens"] > 32 * 10 and step["reward"] > 0.2 for step in steps)
