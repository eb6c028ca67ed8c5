"""Check that two runs of GRPO with entirely different engine options give the same
checkpoint.

`python -m examples.same_hash` prints the SHA-256 of both and fails if they differ.
"""

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    task = largest_number(options.seed, num_held_out=16)
    runs: list[Run] = []
    for choice in (ROOMY, TIGHT):
        print(", ".join(f"{name}={value}" for name, value in choice.items()), flush=True)
        changes = {"model": options.model, "reference": options.model, "steps": options.steps}
        table = {f"engine.{name}": value for name, value in choice.items()}
        config = read_config(
            CONFIG, {**changes, "seed": options.seed, "engine.max_model_len": 64, **table}
        )
        run = whole_run(config, task)
        rewards = " ".join(f"{step.reward:.2f}" for step in run.steps)
        print(
            f"  {run.engine_steps} engine steps, {run.preemptions} preemptions, {run.seconds:.0f} "
            f"s; rewards {rewards}"
        )
        print(f"  SHA-256 of the last checkpoint: {run.sha256}", flush=True)
        runs.append(run)
    if runs[0].sha256 != runs[1].sha256:
        sys.exit("The checkpoints differ.")
    if not runs[1].preemptions:
        sys.exit(
            "Nothing was preempted, so preemption was not tested; give the second run less "
            "kv_cache_memory."
        )
    print(f"The same checkpoint after {options.steps} steps.")


if __name__ == "__main__":
    main()
