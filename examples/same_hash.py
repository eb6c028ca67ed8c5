"""Check that two runs of GRPO with entirely different engine options give the same checkpoint, and
that it is the one that other processors gave.

`python -m examples.same_hash` prints the SHA-256 of both runs and fails if they differ from each
other or from the one recorded in `same_hash.json`. `--short` makes only the first run.
"""

import argparse
import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.grpo.largest import largest_number
from nano_train.config import RunConfig, read_config
from nano_train.questions import Task
from nano_train.records import StepRecord
from nano_train.trainer import Trainer

CONFIG = Path(__file__).parent / "grpo" / "run.toml"
RECORDED = Path(__file__).with_suffix(".json")
MODEL, SEED, STEPS = "smollm2-135m", 0, 3  # of the recorded runs
SIZE = {"task.prompts": 2, "task.samples": 4}
ROOMY: dict[str, Any] = {
    "max_batch_size": 256,
    "block_size": 16,
    "cache_type": "paged",
    "kv_cache_memory": 2**27,
    "lookahead": 0,
    "num_threads": 2,
}
TIGHT: dict[str, Any] = {
    "max_batch_size": 16,
    "max_chunk_tokens": 7,
    "block_size": 8,
    "cache_type": "radix",
    "kv_cache_memory": 12
    * 8
    * 23_040,  # 12 blocks of SmolLM2-135M in bfloat16, which forces preemption
    "lookahead": 1,
    "num_threads": 1,
}


@dataclass(frozen=True)
class Run:
    """Result of a run: the hash of its last checkpoint, and statistics."""

    sha256: str
    steps: list[StepRecord]
    engine_steps: int
    preemptions: int
    drafts: int  # draft tokens computed, accepted or not
    seconds: float


def whole_run(config: RunConfig, task: Task) -> Run:
    """Run all steps without a folder."""
    began = time.perf_counter()
    with Trainer(config, task) as trainer:
        steps = [step.record for step in trainer.steps()]
        stats = trainer.engine.stats()
        seconds = time.perf_counter() - began
        drafts = stats.speculation.num_drafted if stats.speculation is not None else 0
        return Run(
            *(trainer.sha256(), steps, stats.num_steps, stats.num_preemptions, drafts, seconds)
        )


def recorded(dtype: str, sums: str, steps: int, seed: int) -> str | None:
    """Return the SHA-256 of `MODEL` after a run, on every processor. None: it is not recorded.

    The law of sums does not matter in float32.
    """
    law = sums if dtype == "bfloat16" else "any"
    hashes: dict[str, str] = json.loads(RECORDED.read_text("utf-8"))
    prompts, samples = SIZE.values()
    size = f"{steps} steps of {prompts} x {samples}"
    return hashes.get(f"{dtype}, {law} sums, {size}") if seed == SEED else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--sums", choices=("pairs", "tiles"), default="pairs")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--short", action="store_true", help="only the first run")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    task = largest_number(options.seed, num_held_out=16)
    runs: list[Run] = []
    for choice in (ROOMY,) if options.short else (ROOMY, TIGHT):
        print(", ".join(f"{name}={value}" for name, value in choice.items()), flush=True)
        run = whole_run(config_of(options, choice), task)
        rewards = " ".join(f"{step.reward:.2f}" for step in run.steps)
        print(
            f"  {run.engine_steps} engine steps, {run.preemptions} preemptions, {run.seconds:.0f} "
            f"s; rewards {rewards}"
        )
        print(f"  SHA-256 of the last checkpoint: {run.sha256}", flush=True)
        runs.append(run)
    if runs[0].sha256 != runs[-1].sha256:
        sys.exit("The checkpoints differ.")
    if not options.short and not runs[1].preemptions:
        sys.exit(
            "Nothing was preempted, so preemption was not tested; give the second run less "
            "kv_cache_memory."
        )
    if not options.short:
        print(f"The same checkpoint after {options.steps} steps.")
    if options.model == MODEL:
        of_others = recorded(options.dtype, options.sums, options.steps, options.seed)
        compare(of_others, runs[0].sha256)


def config_of(options: argparse.Namespace, choice: dict[str, Any]) -> RunConfig:
    """Return a short run's configuration with these options of the engine."""
    engine = {"dtype": options.dtype, "cpu_sums": options.sums, "max_model_len": 64, **choice}
    engine["kv_cache_memory"] *= 2 if options.dtype == "float32" else 1
    changes = {"model": options.model, "reference": options.model, "steps": options.steps}
    changes |= {"seed": options.seed, **SIZE}
    return read_config(
        CONFIG, changes | {f"engine.{name}": value for name, value in engine.items()}
    )


def compare(expected: str | None, actual: str) -> None:
    """End the process if another checkpoint is recorded."""
    if expected is None:
        print(f"No checkpoint of this run is recorded in {RECORDED.name}.")
    elif expected != actual:
        sys.exit(f"Other processors gave {expected}, as recorded in {RECORDED.name}.")
    else:
        print(f"It is the one recorded in {RECORDED.name}, which every processor gives.")


if __name__ == "__main__":
    main()
