"""A tour in under a minute: groups of samples with logprobs, then a weight update during a sample."""

import logging
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.checkpoints.loading import read_tensors

MODEL = "smollm2-135m"
QUESTIONS = (
    "What is the capital of France?",
    "Explain what a computer does, in one sentence.",
    "What is gravity?",
)
SAMPLES_PER_PROMPT = 4
PARAMS = SamplingParams(temperature=0.8, max_tokens=48, seed=1, raw_logprobs=True)
CHANGED = "model.norm.weight"  # the weight that the third part changes
FACTOR = 2.0  # doubles every logit, so the model is more certain of each choice
STEPS_BEFORE_CHANGE = 12

console = Console(highlight=False)


def main() -> None:
    # converting the model logs many lines
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with load() as engine:
        prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
        sample_groups(engine, prompts)
        change_weights(engine, prompts[-1])


def load() -> InferenceEngine:
    title("1. Load a model")
    say(
        f"Loading {MODEL}. The first run also converts its GGUF file, which takes 10 to 20 seconds."
    )
    start = time.perf_counter()
    with console.status("loading"):
        engine = InferenceEngine(
            EngineConfig(MODEL, ref_model_path=MODEL, max_batch_size=16, max_model_len=1024)
        )
    console.print(f"Ready after {time.perf_counter() - start:.1f} s.\n")
    console.print(str(engine.memory_budget))
    note("The KV cache holds the keys and values of all tokens so far. Sequences share its blocks.")
    console.print(f"numerics {engine.numerics.fingerprint}")
    note("Backend, dtype, device. Every sample records this line. Equal lines mean equal bits.")
    return engine


def sample_groups(engine: InferenceEngine, prompts: list[Any]) -> None:
    title(f"2. Sample {SAMPLES_PER_PROMPT} answers to each of {len(prompts)} prompts")
    say(
        f"Temperature {PARAMS.temperature}, at most {PARAMS.max_tokens} tokens, seed "
        f"{PARAMS.seed}. Every run on this "
        "machine gives the same answers. With 135 million parameters, the model makes mistakes."
    )
    start = time.perf_counter()
    samples = engine.generate(prompts, PARAMS, SAMPLES_PER_PROMPT, progress=console.is_terminal)
    seconds = time.perf_counter() - start
    note("mean logprob: mean log of the tokens' probabilities. 0 is certain, -0.69 is one in two.")
    note("stop: the model ended its answer. length: the answer reached the token limit.")
    note("weight version: number of updates of the model's weights. 0 is the checkpoint.")
    for index, question in enumerate(QUESTIONS):
        group = samples[index * SAMPLES_PER_PROMPT : (index + 1) * SAMPLES_PER_PROMPT]
        console.print(
            f"\n[bold]{escape(question)}[/bold]  [dim]({len(group[0].prompt_tokens)} prompt "
            "tokens)[/dim]"
        )
        for sample in group:
            show(sample)
    summary(engine, samples, seconds)


def summary(engine: InferenceEngine, samples: list[TrainingSample], seconds: float) -> None:
    tokens = sum(len(sample.completion_tokens) for sample in samples)
    computed = engine.stats().prompt_tokens_computed
    alone = sum(len(sample.prompt_tokens) for sample in samples)
    rows = (
        ("samples", f"{len(samples)}"),
        ("completion tokens", f"{tokens:,}"),
        ("time", f"{seconds:.1f} s"),
        ("speed", f"{tokens / seconds:,.1f} completion tokens per second"),
        ("prompt tokens computed", f"{computed:,}"),
        ("without sharing", f"{alone:,}, if each sample computed its own prompt"),
        ("prefill saved by sharing", f"{1 - computed / alone:.0%}"),
    )
    console.print("\n[bold]In total[/bold]")
    for name, value in rows:
        console.print(f"  {name:<26}{value}")
    note("Samples of one prompt share its computation. Prompts with equal beginnings share blocks.")


def change_weights(engine: InferenceEngine, prompt: Any) -> None:
    title("3. Change the weights during a sample")
    say(f"A request for the last prompt starts under weight version {engine.get_weight_version()}.")
    engine.add_request(prompt, PARAMS)
    for _ in range(STEPS_BEFORE_CHANGE):
        engine.step()
    update = engine.update_weights({CHANGED: scaled_by(engine, FACTOR)}, blocking=False)
    say(
        f"After {STEPS_BEFORE_CHANGE} tokens, {CHANGED} is multiplied by {FACTOR:g}, which makes "
        f"the model more certain. Version {update.version} is live from the next step on, and the "
        "sample continues."
    )
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    console.print()
    show(samples[0])
    for span in samples[0].weight_versions:
        mean = average(samples[0].logprobs[span.start : span.end])
        say(
            f"version {span.version} sampled tokens {span.start} to {span.end - 1}, mean logprob "
            f"{mean:.2f}",
            indent=4,
        )
    note("A trainer thus knows which tokens are off-policy, and by how many updates.")
    console.print()
    say(f"A new request uses only version {engine.get_weight_version()}:")
    console.print()
    after = engine.generate(prompt, PARAMS)[0]
    show(after)
    drift = average(after.raw_logprobs or ()) - average(after.ref_logprobs or ())
    say(f"mean log ratio to the frozen copy of version 0: {drift:.2f}", indent=4)
    note(
        "The reference scores each sample while others are decoded. Before the change, the ratio "
        "is exactly 0."
    )


def scaled_by(engine: InferenceEngine, factor: float) -> torch.Tensor:
    return dict(read_tensors(engine.model_folder))[CHANGED] * factor


def show(sample: TrainingSample) -> None:
    console.print(
        f"  [cyan]sample {sample.sample_index}[/cyan] [dim]| {len(sample.completion_tokens)} "
        "tokens | mean logprob "
        f"{average(sample.logprobs):.2f} | {sample.finish_reason} | weight version "
        f"{sample.weight_version}[/dim]"
    )
    say(" ".join((sample.text or "").split()), indent=4)


def average(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def title(text: str) -> None:
    console.print(f"\n[bold green]{text}[/bold green]")


def note(text: str) -> None:
    say(text, indent=2, style="dim italic")


def say(text: str, indent: int = 0, style: str = "") -> None:
    """Print text that is already wrapped. Rich's own wrapping pads lines, which shows in files."""
    margin = " " * indent
    lines = textwrap.fill(text, console.width, initial_indent=margin, subsequent_indent=margin)
    console.print(lines, style=style, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
