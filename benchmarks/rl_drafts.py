"""Drafts in RL. Whole GRPO runs: without drafts, with drafts from history, and also with drafts of
the policy's own layers. An evaluation that is repeated after a small update.
"""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import weight_transfer
from benchmarks.measure import Row, show, spread
from benchmarks.ours import Options, engine_config
from examples.same_hash import Run, whole_run
from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.checkpoints.loading import load_spec, resolve_model
from nano_inference.rl import score
from nano_train.config import RunConfig
from nano_train.questions import Question, Task

# draft options of the engine
MODES: dict[str, dict[str, Any]] = {"none": {}, "history": {"speculation": "history"}}
SELF = "history and self"
KL = 0.002  # per token, from the weights of one run to those of the next
TOKENS = 64  # per answer
ANSWER = 32  # tokens of each answer in the whole runs
CASES = ((1.0, 1), (0.0, 1), (1.0, 4))  # temperature, concurrent samples
SUBJECTS = (
    "The history of the bicycle begins",
    "To bake bread, first",
    "Photosynthesis is",
    "A good teacher knows",
    "The moon goes around the earth",
    "In a small village by the sea",
    "The first computers were",
    "When water freezes,",
)


@dataclass(frozen=True)
class Recipe:
    """Settings of the whole runs."""

    steps: int
    learning_rate: float
    prompts: int = 2
    samples: int = 4


def measure(options: Options, parts: tuple[str, ...], recipe: Recipe) -> list[Row]:
    """Return the rows of these parts (`PARTS`). `recipe` configures the whole runs."""
    rows: list[Row] = []
    for part in parts:
        found = list(PARTS[part](options, recipe))
        columns: dict[str, Callable[[Row], Any]] = {"what": lambda row: row["name"]}
        for name in ("seconds", "cpu_seconds", "engine_steps", "tokens_a_step"):
            columns[name] = lambda row, name=name: row.get(name)
        show(part, columns, found)
        rows += found
    return rows


def grpo(options: Options, recipe: Recipe) -> Iterator[Row]:
    """Run GRPO in turns, on prompts that repeat in every epoch. All runs must end in the same
    checkpoint.
    """
    modes = {**MODES, SELF: {**MODES["history"], **self_drafts(options)}}
    runs: dict[str, list[tuple[Run, float]]] = {mode: [] for mode in modes}
    for _ in range(options.repeats):
        for mode, done in runs.items():
            config = run_config(options, recipe, **modes[mode])
            before = cpu_seconds()
            run = whole_run(config, low_ids())
            done.append((run, cpu_seconds() - before))
            print(f"{mode}: {run.seconds:.0f} s, {run.engine_steps} engine steps, {run.sha256}")
    hashes = {run.sha256 for done in runs.values() for run, _ in done}
    if len(hashes) != 1:
        raise AssertionError(f"the checkpoints differ: {hashes}")
    for mode, done in runs.items():
        run = done[0][0]
        yield {
            "name": f"GRPO, {recipe.steps} steps, {mode}",
            "sha256": run.sha256,
            "seconds": spread(each.seconds for each, _ in done),
            "cpu_seconds": spread(cpu for _, cpu in done),
            "engine_steps": spread(float(each.engine_steps) for each, _ in done),
            "rows_of_drafts": spread(float(each.drafts) for each, _ in done),
            "trained_tokens": sum(step.tokens for step in run.steps),
            "first_and_last_reward": [run.steps[0].reward, run.steps[-1].reward],
            "mismatch": max(step.mismatch or 0.0 for step in run.steps),
        }


def run_config(options: Options, recipe: Recipe, **engine: Any) -> RunConfig:
    """Return a run whose questions are those of `low_ids`."""
    model = engine_config(options, max_model_len=128, kv_cache_memory=2**27, **engine)
    names = ("dtype", "backend", "num_threads", "device", "max_model_len", "kv_cache_memory")
    return RunConfig.model_validate(
        {
            "model": model.model_path,
            "steps": recipe.steps,
            "task": {
                "train": "low_ids",
                "reward": "low_ids",
                "prompts": recipe.prompts,
                "samples": recipe.samples,
            },
            "sampling": {"max_tokens": ANSWER},
            "optimizer": {"learning_rate": recipe.learning_rate},
            "loss": {"aggregation": "token"},
            "engine": {name: getattr(model, name) for name in (*names, *engine)},
        }
    )


def self_drafts(options: Options) -> dict[str, Any]:
    """Use nine tenths of the policy's layers as a source of drafts."""
    num_layers = load_spec(resolve_model(options.model)).num_layers
    return {"draft_model": "self", "draft_layers": max(1, num_layers - -(-num_layers // 10))}


def low_ids() -> Task:
    """Reward ids below 150, which any model can learn."""
    questions = [Question([10 + number, 200, 30 + 7 * number % 50, 5]) for number in range(12)]

    def reward(sample: TrainingSample, _: Any) -> float:
        ids = sample.completion_tokens
        return sum(token_id < 150 for token_id in ids) / len(ids)

    return Task(questions[4:], questions[:4], reward)


def rerun(options: Options, _: Recipe) -> Iterator[Row]:
    """Repeat an evaluation with the same seeds, after adding noise to the weights. All modes must
    give equal answers.
    """
    engines = {
        mode: InferenceEngine(engine_config(options, max_model_len=512, **told))
        for mode, told in MODES.items()
    }
    old = weight_transfer.state_dict(engines["none"].model)
    new, kl = weights_at(engines["none"], old, KL)
    for temperature, at_once in CASES:
        found: dict[str, list[tuple[float, float, int]]] = {mode: [] for mode in MODES}
        answers: dict[str, list[TrainingSample]] = {}
        same = 0.0
        for turn in range(options.repeats):
            for mode, engine in engines.items():
                engine.update_weights(old)
                last = answer(engine, temperature, len(SUBJECTS), turn)
                engine.update_weights(new)
                cpu, began, made = cpu_seconds(), time.perf_counter(), engine.stats().num_steps
                answers[mode] = answer(engine, temperature, at_once, turn)
                seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
                found[mode].append((seconds, cpu, engine.stats().num_steps - made))
                same += common(last, answers[mode]) / options.repeats / len(MODES)
            bits = [
                [(each.completion_tokens, each.logprobs) for each in answers[mode]]
                for mode in MODES
            ]
            assert bits[0] == bits[1], "drafts changed an answer"
        tokens = len(SUBJECTS) * TOKENS
        print(f"temperature {temperature}, {at_once} at once: {found}")
        for mode, runs in found.items():
            yield {
                "name": f"rerun, temperature {temperature:g}, {at_once} at once, {mode}",
                "kl": round(kl, 6),
                "tokens": tokens,
                "tokens_before_the_first_other_one": round(same, 1),
                "seconds": spread(seconds for seconds, _, _ in runs),
                "cpu_seconds": spread(cpu for _, cpu, _ in runs),
                "engine_steps": spread(float(steps) for _, _, steps in runs),
                # per sample; 1 without drafts
                "tokens_a_step": spread(tokens / at_once / steps for _, _, steps in runs),
            }
    for engine in engines.values():
        engine.shutdown()


def answer(
    engine: InferenceEngine, temperature: float, at_once: int, turn: int
) -> list[TrainingSample]:
    """Answer all prompts, this many at a time."""
    samples: list[TrainingSample] = []
    for first in range(0, len(SUBJECTS), at_once):
        places = range(first, first + at_once)
        params = [
            SamplingParams(
                temperature=temperature,
                seed=1000 * turn + place,
                max_tokens=TOKENS,
                ignore_eos=True,
            )
            for place in places
        ]
        prompts = [SUBJECTS[place] for place in places]
        samples += engine.generate(prompts, params, progress=False)
    return samples


def common(last: list[TrainingSample], now: list[TrainingSample]) -> float:
    """Return the mean number of tokens before two answers differ."""
    lengths: list[int] = []
    for one, other in zip(last, now, strict=True):
        pairs = zip(one.completion_tokens, other.completion_tokens, strict=True)
        parted = (place for place, (a, b) in enumerate(pairs) if a != b)
        lengths.append(next(parted, len(one.completion_tokens)))
    return sum(lengths) / len(lengths)


def weights_at(
    engine: InferenceEngine, old: dict[str, Tensor], wanted: float
) -> tuple[dict[str, Tensor], float]:
    """Add noise to the weights so that the KL divergence per token is about `wanted`. Return them
    and the divergence.
    """
    samples = answer(engine, 1.0, len(SUBJECTS), 99)
    generator = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(each.shape, generator=generator) * each.float().std()
        for name, each in old.items()
    }
    scale, found = 0.005, float("nan")
    for _ in range(6):
        new = {name: (old[name].float() + scale * noise[name]).to(old[name].dtype) for name in old}
        engine.update_weights(new)
        found = divergence(engine, samples)
        print(f"noise of {scale:.4f} of each tensor's deviation: KL {found:.5f} per token")
        if 0.8 * wanted < found < 1.2 * wanted:
            return new, found
        scale *= min(max((wanted / found) ** 0.5, 0.1), 10)
    raise AssertionError(f"no noise gives a KL of {wanted}; the last was {found}")


def divergence(engine: InferenceEngine, samples: list[TrainingSample]) -> float:
    """Return KL(old || new) per token from samples of the old weights: the mean of r - 1 - log r,
    which is never negative (Schulman 2020, http://joschu.net/blog/kl-approx.html).
    """
    total, count = 0.0, 0
    sequences = [each.prompt_tokens + each.completion_tokens for each in samples]
    starts = [len(each.prompt_tokens) for each in samples]
    scores = score(engine, sequences, from_position=starts)
    for now, sample in zip(scores, samples, strict=True):
        log_ratio = now.double() - torch.tensor(sample.logprobs, dtype=torch.float64)
        total += float((log_ratio.exp() - 1 - log_ratio).sum())
        count += len(log_ratio)
    return total / count


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    ours, theirs = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return ours.ru_utime + ours.ru_stime + theirs.ru_utime + theirs.ru_stime


PARTS: dict[str, Callable[[Options, Recipe], Iterator[Row]]] = {"grpo": grpo, "rerun": rerun}
