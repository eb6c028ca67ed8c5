"""The GRPO loop on a tiny model: it learns, and nothing but recipe, task and model decides its last
checkpoint.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.grpo import Recipe, Task, exact_match, largest_number, normalised, plot
from examples.same_hash import Run, whole_run
from nano_inference import EngineConfig, TrainingSample
from tests.models.tiny import tiny_llama

BLOCK_BYTES = 2 * 2 * 2 * 16 * 2  # a token: 2 layers, keys and values, 2 heads of 16 in bfloat16
RECIPE = Recipe(steps=4, prompts=3, samples=6, max_tokens=8, learning_rate=2e-3, test_every=2)
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


def low_ids(sample: TrainingSample, _: str) -> float:
    """Share of tokens in the lower half of the vocabulary: more than half only if the policy has
    learned.
    """
    return sum(token < 150 for token in sample.completion_tokens) / len(sample.completion_tokens)


def low_id_task() -> Task:
    prompts = [[10 + number, 200, 30 + 7 * number % 50, 5] for number in range(40)]
    return Task(
        [(prompt, "") for prompt in prompts[8:]], [(prompt, "") for prompt in prompts[:8]], low_ids
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tiny_llama(tmp_path / "model", dtype=torch.bfloat16))


def run(model: str, recipe: Recipe, **options: Any) -> Run:
    before = torch.get_num_threads()
    config = EngineConfig(
        model, ref_model_path=model, dtype="bfloat16", device="cpu", max_model_len=32, **options
    )
    try:
        return whole_run(config, low_id_task(), recipe)
    finally:
        torch.set_num_threads(before)


def test_two_runs_under_different_options_end_in_the_same_checkpoint(model: str) -> None:
    roomy, tight = run(model, RECIPE, **ROOMY), run(model, RECIPE, **TIGHT)
    assert tight.preemptions > 0
    assert tight.engine_steps > roomy.engine_steps
    assert tight.sha256 == roomy.sha256
    untimed = [
        [dataclasses.replace(step, seconds=0.0) for step in each.steps] for each in (roomy, tight)
    ]
    assert untimed[0] == untimed[1]
    other = run(model, dataclasses.replace(RECIPE, seed=1), **ROOMY)
    assert other.sha256 != roomy.sha256  # so the hash sees what was learned


def test_the_reward_rises_also_on_held_out_prompts(model: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, steps=41, test_every=8)
    steps = run(model, recipe, **ROOMY).steps
    assert steps[0].kl == 0.0
    assert steps[-1].kl > 0.0
    assert all(step.mismatch == 0.0 for step in steps)
    assert (
        sum(step.reward for step in steps[-5:]) / 5
        > sum(step.reward for step in steps[:5]) / 5 + 0.1
    )
    assert [step.step for step in steps if step.held_out is not None] == [0, 8, 16, 24, 32, 40]
    pytest.importorskip("matplotlib")
    plot(steps, tmp_path / "curves" / "grpo.png")
    assert (tmp_path / "curves" / "grpo.png").stat().st_size > 10_000


def test_advantages_of_a_group() -> None:
    assert normalised([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]
    assert normalised([1.0, 1.0]) == [0.0, 0.0]


def test_questions_and_their_answers() -> None:
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
def test_only_the_answer_alone_is_worth_something(text: str | None, reward: float) -> None:
    sample = TrainingSample((1,), (2,), (0.0,), None, 0, "stop", text=text)
    assert exact_match(sample, "52") == reward
