"""A plain GRPO loop: in four minutes on two cores SmolLM2-135M learns which of three numbers is the
largest.

At every token of every step the trainer's logprob is the engine's, to the bit; the loop asserts it.
So the ratio of the two is exactly 1, nothing has to be corrected, and on one kind of processor the
last checkpoint is a function of the seed: batch size, chunks, cache, preemption, lookahead and
threads do not change one bit of it (`same_hash.py`).
"""

import argparse
import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.rl import PolicyModel

EXAMPLE = "17, 31 or 52? 52\n"  # stands before every question


@dataclass(frozen=True)
class Task:
    """Questions (a prompt and its answer) to learn from, in turn; others to test on; and what a
    sample is worth.
    """

    train: list[tuple[Any, str]]
    held_out: list[tuple[Any, str]]
    reward: Callable[[TrainingSample, str], float]
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """With model and task, all that the last checkpoint depends on."""

    steps: int = 150
    prompts: int = 4  # a step
    samples: int = 8  # of a prompt: a group
    max_tokens: int = 8
    learning_rate: float = 1e-5
    seed: int = 0
    test_every: int = 10  # steps


@dataclass(frozen=True)
class Step:
    """What is recorded of a step: rewards, and how far the policy that earned them is from the
    initial one.
    """

    step: int
    seconds: float  # since the loop began
    reward: float  # mean of the samples
    held_out: float | None  # mean of the greedy answers; None in most steps
    kl: float  # a token
    tokens: int
    mismatch: float  # largest |engine - trainer| of a logprob


def largest_number(seed: int, num_held_out: int = 64) -> Task:
    """Which of three numbers is the largest? No three numbers of the test occur in training, in any
    order.
    """
    rng = random.Random(seed)
    triples = [rng.sample(triple, 3) for triple in combinations(range(10, 100), 3)]
    rng.shuffle(triples)
    questions = [(f"{EXAMPLE}{a}, {b} or {c}?", str(max(a, b, c))) for a, b, c in triples]
    return Task(questions[num_held_out:], questions[:num_held_out], exact_match, stop=("\n",))


def exact_match(sample: TrainingSample, answer: str) -> float:
    """1 for the answer and nothing else (but a full stop), 0 for anything else."""
    return float((sample.text or "").strip().removesuffix(".") == answer)


def train(
    engine: InferenceEngine, policy: PolicyModel, task: Task, recipe: Recipe
) -> Iterator[Step]:
    """One optimizer step for each batch of fresh samples. The engine's reference model is the
    initial policy.
    """
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=recipe.learning_rate, weight_decay=0.0, foreach=False
    )
    limits: dict[str, Any] = {"max_tokens": recipe.max_tokens, "stop": task.stop}
    size, began = recipe.samples, time.perf_counter()
    for step in range(recipe.steps):
        tested = step % recipe.test_every == 0 or step == recipe.steps - 1
        held_out = (
            accuracy(engine, task, SamplingParams(temperature=0, **limits)) if tested else None
        )
        numbers = range(step * recipe.prompts, (step + 1) * recipe.prompts)
        asked = [task.train[number % len(task.train)] for number in numbers]
        params = [SamplingParams(seed=(recipe.seed << 32) + number, **limits) for number in numbers]
        samples = engine.generate([prompt for prompt, _ in asked], params, size, progress=False)
        rewards = [
            task.reward(sample, asked[place // size][1]) for place, sample in enumerate(samples)
        ]
        advantages = [
            each
            for at in range(0, len(rewards), size)
            for each in normalised(rewards[at : at + size])
        ]

        sequences = [sample.prompt_tokens + sample.completion_tokens for sample in samples]
        trainer = policy.logprobs(
            sequences, from_position=[len(sample.prompt_tokens) for sample in samples]
        )
        pairs = [
            (ours, torch.tensor(sample.logprobs))
            for ours, sample in zip(trainer, samples, strict=True)
        ]
        mismatch = max(float((ours.detach() - theirs).abs().max()) for ours, theirs in pairs)
        assert all(torch.equal(ours.detach(), theirs) for ours, theirs in pairs), (
            f"engine and trainer: {mismatch}"
        )

        tokens = sum(len(sample.logprobs) for sample in samples)
        if any(advantages):
            # all 1; their gradients are what matters
            ratios = [(ours - theirs).exp() for ours, theirs in pairs]
            loss = (
                -sum(a * ratio.sum() for a, ratio in zip(advantages, ratios, strict=True)) / tokens
            )
            torch.as_tensor(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            policy.publish()
        yield Step(
            step,
            time.perf_counter() - began,
            mean(rewards),
            held_out,
            divergence(samples),
            tokens,
            mismatch,
        )


def accuracy(engine: InferenceEngine, task: Task, params: SamplingParams) -> float:
    """Mean reward on the held-out questions."""
    samples = engine.generate([prompt for prompt, _ in task.held_out], params, progress=False)
    return mean(
        [
            task.reward(sample, answer)
            for sample, (_, answer) in zip(samples, task.held_out, strict=True)
        ]
    )


def normalised(rewards: list[float]) -> list[float]:
    """Advantages of a group: rewards less their mean, by their deviation; 0 where all are equal."""
    middle = mean(rewards)
    deviation = mean([(reward - middle) ** 2 for reward in rewards]) ** 0.5
    return [(reward - middle) / deviation if deviation else 0.0 for reward in rewards]


def divergence(samples: list[TrainingSample]) -> float:
    """KL(policy || initial policy) a token, estimated as the mean log ratio of the tokens that the
    policy sampled.
    """
    return float(
        torch.cat([torch.tensor(s.logprobs) - torch.tensor(s.ref_logprobs) for s in samples]).mean()
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def checkpoint_hash(policy: PolicyModel) -> str:
    """SHA-256 of all parameters' names and bytes, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def plot(steps: list[Step], path: Path) -> None:
    """Reward, KL and mismatch by step. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    at, tested = (
        [each.step for each in steps],
        [each for each in steps if each.held_out is not None],
    )
    figure, (reward, kl, mismatch) = plt.subplots(
        1, 3, figsize=(11, 3), layout="constrained", dpi=150
    )
    recent = [
        mean([each.reward for each in steps[max(0, i - 9) : i + 1]]) for i in range(len(steps))
    ]
    reward.plot(
        at, [each.reward for each in steps], ".", color="#bbbbbb", label="training, each step"
    )
    reward.plot(at, recent, color="#7a7a7a", label="training, last 10 steps")
    reward.plot(
        [each.step for each in tested],
        [each.held_out for each in tested],
        "o-",
        color="#2a6fdb",
        label="held out",
    )
    reward.set(
        title=f"reward ({steps[-1].seconds / 60:.1f} minutes)", xlabel="step", ylim=(0, 1.03)
    )
    reward.legend(loc="lower right", frameon=False)
    kl.plot(at, [each.kl for each in steps], color="#b5563c")
    kl.set(title="KL to the initial policy, a token", xlabel="step")
    mismatch.plot(at, [each.mismatch for each in steps], color="#2a6fdb")
    tokens = sum(each.tokens for each in steps)
    mismatch.set(
        title="largest |engine - trainer|", xlabel=f"step ({tokens:,} tokens in all)", ylim=(-1, 1)
    )
    for axis in (reward, kl, mismatch):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--max-batch-size", type=int, default=EngineConfig.max_batch_size)
    parser.add_argument("--max-chunk-tokens", type=int)
    parser.add_argument("--block-size", type=int, default=EngineConfig.block_size)
    parser.add_argument("--cache-type", choices=("paged", "radix"), default="paged")
    parser.add_argument(
        "--kv-cache-memory", type=int, default=2**27, help="bytes; little of it forces preemption"
    )
    parser.add_argument("--lookahead", type=int, choices=(0, 1))
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--out", type=Path, help="folder for grpo.json and grpo.png")
    parser.add_argument(
        "--sha", action="store_true", help="print the SHA-256 of the last checkpoint"
    )
    options = vars(parser.parse_args())
    out, sha = options.pop("out"), options.pop("sha")
    recipe = Recipe(**{name: options.pop(name) for name in ("steps", "seed", "learning_rate")})
    # it converts the model, and has much to say about it
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = options.pop("model")
    config = EngineConfig(
        model, ref_model_path=model, dtype="bfloat16", max_model_len=128, **options
    )
    steps: list[Step] = []
    with InferenceEngine(config) as engine:
        policy = PolicyModel(engine)
        for step in train(engine, policy, largest_number(recipe.seed), recipe):
            steps.append(step)
            tested = "" if step.held_out is None else f", held out {step.held_out:.2f}"
            print(
                f"step {step.step:3} at {step.seconds:5.0f} s: reward {step.reward:.2f}{tested}, "
                f"KL {step.kl:.3f}, "
                f"largest difference to the trainer {step.mismatch:g}",
                flush=True,
            )
        if sha:
            print(f"SHA-256 of the checkpoint: {checkpoint_hash(policy)}")
    if out is not None:
        plot(steps, out / "grpo.png")
        report = {
            "recipe": asdict(recipe),
            "options": options | {"model": model},
            "steps": [asdict(s) for s in steps],
        }
        (out / "grpo.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
