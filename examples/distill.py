"""On-policy distillation: a damaged copy of SmolLM2-135M learns to write more like the
original.

In each step the student continues some texts. Its engine returns the logprobs of its most probable
tokens, the teacher's engine those of the same ids, and `PolicyModel` the student's again, with
gradients. The loss is their reverse KL divergence: the student is graded on what it writes itself.
With `--loss forward` the teacher names the ids, and the student learns to cover them.
"""

import argparse
import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.rl import PolicyModel, score, top_tokens

OPENINGS = (
    *("The history of the city begins", "Water boils when", "A good teacher", "In the morning,"),
    *("The largest animal in the sea", "To bake bread, you", "Once upon a time", "Trees grow"),
    *("The function returns", "My grandmother used to", "When the train arrived", "Light travels"),
    *("The king and his daughter", "If you want to learn", "Most birds", "The experiment showed"),
)
HELD_OUT = (
    *("The moon is", "She opened the door and", "To repair a bicycle,", "In the year 1900"),
    *("The main cause of", "Children like to", "A triangle has", "After the storm, the"),
)


@dataclass(frozen=True)
class Recipe:
    """Settings of a run.

    Attributes:
        damage: Noise in the student's matrices, relative to the standard deviation of each.
        width: Number of ids at each position.
    """

    steps: int = 40
    num_openings: int = 4
    max_tokens: int = 16
    width: int = 32
    damage: float = 0.2
    learning_rate: float = 2e-4
    loss: str = "reverse"
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """Results of one step: KL divergence on the ids, and on all tokens of held-out texts (measured
    at some steps only).
    """

    step: int
    loss: float
    held_out: float | None
    seconds: float


def damage(policy: PolicyModel, amount: float, seed: int) -> None:
    """Add noise to the matrices of a policy's layers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in policy.named_parameters():
            if param.dim() == 2 and ".layers." in name:
                noise = torch.randn(param.shape, generator=generator)
                param.add_(noise * (amount * param.std()))


def kl_on_ids(own: Tensor, teacher: Tensor, loss: str) -> Tensor:
    """Return the divergence over named ids at each position, [positions, k] -> [positions].

    The mass of all other tokens counts as one further token.
    """
    own, teacher = _with_rest(own), _with_rest(teacher)
    if loss == "reverse":
        return (own.exp() * (own - teacher)).sum(dim=-1)
    return (teacher.exp() * (teacher - own)).sum(dim=-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    rest = (1 - logprobs.exp().sum(dim=-1, keepdim=True)).clamp(min=1e-6)
    return torch.cat([logprobs, rest.log()], dim=-1)


def named_ids(
    samples: Sequence[TrainingSample], teacher: InferenceEngine, recipe: Recipe
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the ids at each completion token, and the teacher's logprobs of them."""
    sequences = [sample.prompt_tokens + sample.completion_tokens for sample in samples]
    starts = [len(sample.prompt_tokens) for sample in samples]
    if recipe.loss == "forward":
        best = top_tokens(teacher, sequences, recipe.width, from_position=starts)
        return [each.token_ids for each in best], [each.logprobs for each in best]
    ids = [
        torch.tensor([each.token_ids for each in sample.top_logprobs or ()]) for sample in samples
    ]
    return ids, score(teacher, sequences, from_position=starts, targets=ids)


def train(model: str, recipe: Recipe, report: Path | None = None) -> list[Step]:
    """Distill, and return the results of all steps."""
    config = EngineConfig(model, kv_cache_memory=2**28, quantization=None)
    teacher, engine = InferenceEngine(config), InferenceEngine(config)
    policy, original = PolicyModel(engine), PolicyModel(teacher)
    damage(policy, recipe.damage, recipe.seed)
    policy.publish()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    rng = random.Random(recipe.seed)
    steps: list[Step] = []
    for step in range(recipe.steps + 1):
        begin = time.perf_counter()
        held_out = measured(policy, original, recipe) if step % 10 == 0 else None
        openings = rng.sample(OPENINGS, recipe.num_openings)
        params = SamplingParams(
            max_tokens=recipe.max_tokens,
            seed=step,
            top_logprobs=recipe.width,
            ignore_eos=True,
        )
        samples = engine.generate(openings, params)
        ids, theirs = named_ids(samples, teacher, recipe)
        own = policy.logprobs(
            [sample.prompt_tokens + sample.completion_tokens for sample in samples],
            from_position=[len(sample.prompt_tokens) for sample in samples],
            targets=ids,
        )
        loss = kl_on_ids(torch.cat(own), torch.cat(theirs), recipe.loss).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        if step < recipe.steps:
            optimizer.step()
            policy.publish()
        steps.append(Step(step, float(loss.detach()), held_out, time.perf_counter() - begin))
        shown = "" if held_out is None else f", held out {held_out:.3f}"
        print(f"step {step:3}: KL {steps[-1].loss:.3f}{shown}, {steps[-1].seconds:.1f} s")
        if report is not None:
            report.write_text(json.dumps([asdict(each) for each in steps]))
    for each in (engine, teacher):
        each.shutdown()
    return steps


@torch.no_grad()
def measured(policy: PolicyModel, original: PolicyModel, recipe: Recipe) -> float:
    """Return the reverse KL divergence over the whole vocabulary, on the student's own texts."""
    params = SamplingParams(max_tokens=recipe.max_tokens, seed=1, ignore_eos=True)
    samples = policy.engine.generate(HELD_OUT, params)
    values = policy.kl(
        [sample.prompt_tokens + sample.completion_tokens for sample in samples],
        original,
        from_position=[len(sample.prompt_tokens) for sample in samples],
    )
    return float(torch.cat(values).mean())


def plot(steps: Sequence[Step], path: Path) -> None:
    """Plot the divergences by step. Requires matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3), layout="constrained", dpi=150)
    at = [each.step for each in steps]
    axis.plot(
        at, [each.loss for each in steps], color="#bbbbbb", label="training texts, on the ids"
    )
    known = [(each.step, each.held_out) for each in steps if each.held_out is not None]
    axis.plot(
        [step for step, _ in known],
        [held_out for _, held_out in known],
        color="#2a6fdb",
        marker="o",
        label="held-out texts, whole vocabulary",
    )
    axis.set(xlabel="step", ylabel="KL to the teacher (nats)", ylim=(0, None))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--loss", choices=("reverse", "forward"), default=Recipe.loss)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--damage", type=float, default=Recipe.damage)
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--out", type=Path, help="folder for distill.json and distill.png")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    recipe = Recipe(
        steps=options.steps,
        damage=options.damage,
        learning_rate=options.learning_rate,
        loss=options.loss,
    )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    report = None if options.out is None else options.out / "distill.json"
    steps = train(options.model, recipe, report)
    if options.out is not None:
        plot(steps, options.out / "distill.png")


if __name__ == "__main__":
    main()
