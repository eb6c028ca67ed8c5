"""A plain GRPO loop: in four minutes on two cores SmolLM2-135M learns which of three numbers is the
largest. With `--task order` it learns to write down who wants what, as JSON under a grammar.

At every token of every step, trainer and engine compute the same logprob bit for bit, which the
loop asserts. So the importance ratio is exactly 1 and needs no correction. On one kind of processor
the last checkpoint depends only on the seed: batch size, chunks, cache, preemption, lookahead and
threads do not change a bit of it (`same_hash.py`).
"""

import argparse
import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

from nano_inference import (
    EngineConfig,
    Grammar,
    InferenceEngine,
    LoraSettings,
    SamplingParams,
    TrainingSample,
)
from nano_inference.rl import LoraPolicy, PolicyModel

EXAMPLE = "17, 31 or 52? 52\n"  # prefix of every question

NAMES = ("Ann", "Ben", "Eve", "Tom")
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FIELDS = {
    "colour": ("red", "green", "blue", "black", "white"),
    "thing": ("cup", "hat", "lamp", "chair", "book"),
}
ORDER = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 1, "maximum": len(WORDS)},
        **{name: {"enum": list(values)} for name, values in FIELDS.items()},
    },
    "required": ["count", *FIELDS],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Task:
    """A task: training questions (prompt and answer), held-out questions, the reward of a sample,
    and the end of answers, by a stop string or a grammar.
    """

    train: list[tuple[Any, str]]
    held_out: list[tuple[Any, str]]
    reward: Callable[[TrainingSample, str], float]
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    max_tokens: int = 8


@dataclass(frozen=True)
class Recipe:
    """Settings of a run. Together with model and task they determine the last checkpoint."""

    steps: int = 150
    prompts: int = 4  # per step
    samples: int = 8  # per prompt: a group
    learning_rate: float = 1e-5
    seed: int = 0
    test_every: int = 10  # steps


@dataclass(frozen=True)
class Step:
    """Record of a step: rewards, and the distance of the policy from the initial one."""

    step: int
    seconds: float  # since the start of the loop
    reward: float  # mean of the samples
    held_out: float | None  # mean of the greedy answers; None in most steps
    kl: float | None  # per token; None without a reference model
    tokens: int
    mismatch: float  # largest |engine - trainer| of a logprob


def largest_number(seed: int, num_held_out: int = 64) -> Task:
    """Return the task to choose the largest of three numbers. Training contains no held-out triple
    in any order.
    """
    rng = random.Random(seed)
    triples = [rng.sample(triple, 3) for triple in combinations(range(10, 100), 3)]
    rng.shuffle(triples)
    questions = [(f"{EXAMPLE}{a}, {b} or {c}?", str(max(a, b, c))) for a, b, c in triples]
    return Task(questions[num_held_out:], questions[:num_held_out], exact_match, stop=("\n",))


def order(seed: int, num_held_out: int = 64) -> Task:
    """Return the task to write one of two stated orders as JSON. Training contains no held-out
    pair of orders.
    """
    rng = random.Random(seed)
    orders = [*product(range(1, len(WORDS) + 1), FIELDS["colour"], FIELDS["thing"])]
    pairs = [*combinations(orders, 2)]
    rng.shuffle(pairs)
    questions = []
    for pair in pairs:
        names = rng.sample(NAMES, 2)
        told = [f"{name} wants {in_words(*each)}." for name, each in zip(names, pair, strict=True)]
        asked = rng.randrange(2)
        answer = dict(zip(("count", *FIELDS), pair[asked], strict=True))
        questions.append((f"{' '.join(told)}\n{names[asked]}'s order: ", json.dumps(answer)))
    grammar = Grammar.json_schema(ORDER, whitespace="")
    return Task(questions[num_held_out:], questions[:num_held_out], right_fields, (), grammar, 40)


def in_words(count: int, colour: str, thing: str) -> str:
    return f"{WORDS[count - 1]} {colour} {thing}{'s' if count > 1 else ''}"


def right_fields(sample: TrainingSample, answer: str) -> float:
    """Return the share of correct fields. The grammar guarantees JSON if the answer is complete."""
    if sample.finish_reason != "stop":
        return 0.0
    given, right = json.loads(sample.text or ""), json.loads(answer)
    return mean([float(given[name] == value) for name, value in right.items()])


TASKS: dict[str, Callable[[int], Task]] = {"largest": largest_number, "order": order}


def exact_match(sample: TrainingSample, answer: str) -> float:
    """Return 1 for exactly the answer (with or without a full stop), otherwise 0."""
    return float((sample.text or "").strip().removesuffix(".") == answer)


def train(
    engine: InferenceEngine, policy: PolicyModel | LoraPolicy, task: Task, recipe: Recipe
) -> Iterator[Step]:
    """Train with one optimizer step per batch of fresh samples. The engine's reference model, if
    any, is the initial policy.
    """
    adapter = None
    if isinstance(policy, LoraPolicy):  # samples use its adapter
        adapter = policy.publish().name
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=recipe.learning_rate, weight_decay=0.0, foreach=False
    )
    limits: dict[str, Any] = {
        "max_tokens": task.max_tokens,
        "stop": task.stop,
        "grammar": task.grammar,
        "adapter": adapter,
    }
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
            sequences,
            from_position=[len(sample.prompt_tokens) for sample in samples],
            grammar=task.grammar,
        )
        difference = first_difference(samples, trainer)
        assert difference is None, f"step {step}, {difference}"
        pairs = [
            (ours, torch.tensor(sample.logprobs))
            for ours, sample in zip(trainer, samples, strict=True)
        ]
        mismatch = max(float((ours.detach() - theirs).abs().max()) for ours, theirs in pairs)

        tokens = sum(len(sample.logprobs) for sample in samples)
        if any(advantages):
            # all are 1; only their gradients matter
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


def first_difference(samples: list[TrainingSample], trainer: list[torch.Tensor]) -> str | None:
    """Describe the first token whose two logprobs differ in a bit. None if all are equal."""
    for number, (sample, ours) in enumerate(zip(samples, trainer, strict=True)):
        own, theirs = ours.detach(), torch.tensor(sample.logprobs)
        differs = own.view(torch.int32) != theirs.view(torch.int32)
        if differs.any():
            at = int(differs.nonzero()[0])
            return (
                f"sample {number}, position {len(sample.prompt_tokens) + at}, token "
                f"{sample.completion_tokens[at]}: engine {float(theirs[at])!r}, trainer "
                f"{float(own[at])!r}"
            )
    return None


def accuracy(engine: InferenceEngine, task: Task, params: SamplingParams) -> float:
    """Return the mean reward on the held-out questions."""
    samples = engine.generate([prompt for prompt, _ in task.held_out], params, progress=False)
    return mean(
        [
            task.reward(sample, answer)
            for sample, (_, answer) in zip(samples, task.held_out, strict=True)
        ]
    )


def normalised(rewards: list[float]) -> list[float]:
    """Return a group's advantages: rewards minus mean, divided by deviation. 0 if all are equal."""
    middle = mean(rewards)
    deviation = mean([(reward - middle) ** 2 for reward in rewards]) ** 0.5
    return [(reward - middle) / deviation if deviation else 0.0 for reward in rewards]


def divergence(samples: list[TrainingSample]) -> float | None:
    """Estimate KL(policy || initial policy) per token as the mean log ratio of the sampled tokens.
    None without a reference model.
    """
    if samples[0].ref_logprobs is None:
        return None
    return float(
        torch.cat([torch.tensor(s.logprobs) - torch.tensor(s.ref_logprobs) for s in samples]).mean()
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def checkpoint_hash(policy: PolicyModel | LoraPolicy) -> str:
    """Return the SHA-256 of all parameters' names and bytes, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def plot(steps: list[Step], path: Path) -> None:
    """Plot reward, KL (if known) and mismatch by step. Requires matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    at, tested = (
        [each.step for each in steps],
        [each for each in steps if each.held_out is not None],
    )
    panels = 3 if steps[0].kl is not None else 2
    figure, axes = plt.subplots(1, panels, figsize=(11, 3), layout="constrained", dpi=150)
    reward, *kl, mismatch = axes
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
    for axis in kl:
        axis.plot(at, [each.kl for each in steps], color="#b5563c")
        axis.set(title="KL to the initial policy, a token", xlabel="step")
    mismatch.plot(at, [each.mismatch for each in steps], color="#2a6fdb")
    tokens = sum(each.tokens for each in steps)
    mismatch.set(
        title="largest |engine - trainer|", xlabel=f"step ({tokens:,} tokens in all)", ylim=(-1, 1)
    )
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="largest")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train only an adapter of this rank"
    )
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--max-batch-size", type=int, default=EngineConfig.max_batch_size)
    parser.add_argument("--max-chunk-tokens", type=int)
    parser.add_argument("--block-size", type=int, default=EngineConfig.block_size)
    parser.add_argument("--cache-type", choices=("paged", "radix"), default="paged")
    parser.add_argument(
        "--kv-cache-memory",
        type=int,
        default=2**27,
        help="KV cache in bytes; a small one forces preemption",
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
    # converting the model logs many lines
    logging.getLogger("transformers").setLevel(logging.ERROR)
    name, model, rank = options.pop("task"), options.pop("model"), options.pop("lora")
    task = TASKS[name](recipe.seed)
    # a reference model ignores grammars, so the KL of samples with one would be unknown
    reference = model if task.grammar is None else None
    config = EngineConfig(
        model,
        ref_model_path=reference,
        quantization=None,  # the blocks of a .gguf file would round trained weights
        max_model_len=128,
        max_loras=min(rank, 1),
        **options,
    )
    steps: list[Step] = []
    with InferenceEngine(config) as engine:
        settings = LoraSettings(rank=rank, alpha=2.0 * rank) if rank else None
        policy = LoraPolicy(engine, settings) if rank else PolicyModel(engine)
        for step in train(engine, policy, task, recipe):
            steps.append(step)
            tested = "" if step.held_out is None else f", held out {step.held_out:.2f}"
            kl = "" if step.kl is None else f", KL {step.kl:.3f}"
            print(
                f"step {step.step:3} at {step.seconds:5.0f} s: reward {step.reward:.2f}{tested}{kl}, "
                f"largest difference to the trainer {step.mismatch:g} at {step.tokens} tokens",
                flush=True,
            )
        if sha:
            print(f"SHA-256 of the checkpoint: {checkpoint_hash(policy)}")
    if out is not None:
        plot(steps, out / "grpo.png")
        report = {
            "task": name,
            "recipe": asdict(recipe),
            "options": options | {"model": model} | ({"lora": rank} if rank else {}),
            "steps": [asdict(s) for s in steps],
        }
        (out / "grpo.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
