"""A plain GRPO loop: in four minutes on two cores SmolLM2-135M learns which of three numbers is the
largest. With `--task order` it learns to write down who wants what, as JSON under a grammar.

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

EXAMPLE = "17, 31 or 52? 52\n"  # stands before every question

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
    """Questions (a prompt and its answer) to learn from, in turn; others to test on; what a sample
    is worth; and how answers end: by a stop string, or where their grammar does.
    """

    train: list[tuple[Any, str]]
    held_out: list[tuple[Any, str]]
    reward: Callable[[TrainingSample, str], float]
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    max_tokens: int = 8


@dataclass(frozen=True)
class Recipe:
    """With model and task, all that the last checkpoint depends on."""

    steps: int = 150
    prompts: int = 4  # a step
    samples: int = 8  # of a prompt: a group
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
    kl: float | None  # a token; None without a reference model
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


def order(seed: int, num_held_out: int = 64) -> Task:
    """Two orders are told; what does one of the two want? No two orders of the test occur together
    in training.
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
    """Share of the fields that are right. What ended by itself is valid JSON: the grammar's word."""
    if sample.finish_reason != "stop":
        return 0.0
    given, right = json.loads(sample.text or ""), json.loads(answer)
    return mean([float(given[name] == value) for name, value in right.items()])


TASKS: dict[str, Callable[[int], Task]] = {"largest": largest_number, "order": order}


def exact_match(sample: TrainingSample, answer: str) -> float:
    """1 for the answer and nothing else (but a full stop), 0 for anything else."""
    return float((sample.text or "").strip().removesuffix(".") == answer)


def train(
    engine: InferenceEngine, policy: PolicyModel | LoraPolicy, task: Task, recipe: Recipe
) -> Iterator[Step]:
    """One optimizer step for each batch of fresh samples. The engine's reference model, if it has
    one, is the initial policy.
    """
    adapter = None
    if isinstance(policy, LoraPolicy):  # samples are those of its adapter
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


def first_difference(samples: list[TrainingSample], trainer: list[torch.Tensor]) -> str | None:
    """The first token whose two logprobs differ in a bit, in words; None: there is none."""
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


def divergence(samples: list[TrainingSample]) -> float | None:
    """KL(policy || initial policy) a token, estimated as the mean log ratio of the tokens that the
    policy sampled; None without a reference model.
    """
    if samples[0].ref_logprobs is None:
        return None
    return float(
        torch.cat([torch.tensor(s.logprobs) - torch.tensor(s.ref_logprobs) for s in samples]).mean()
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def checkpoint_hash(policy: PolicyModel | LoraPolicy) -> str:
    """SHA-256 of all parameters' names and bytes, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def plot(steps: list[Step], path: Path) -> None:
    """Reward, KL (where there is one) and mismatch by step. Needs matplotlib."""
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
        "--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank alone"
    )
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
    name, model, rank = options.pop("task"), options.pop("model"), options.pop("lora")
    task = TASKS[name](recipe.seed)
    # a reference model scores without grammars: of samples under one the KL would not be known
    reference = model if task.grammar is None else None
    config = EngineConfig(
        model,
        ref_model_path=reference,
        quantization=None,  # a .gguf file's blocks would round what is trained
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
