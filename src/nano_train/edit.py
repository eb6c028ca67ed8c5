"""Edited runs: change a value at a step of a run, and continue from there in a new folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nano_inference.errors import ConfigError
from nano_train.config import read_config
from nano_train.questions import load_task
from nano_train.rebuild import rebuilt, require_step
from nano_train.records import Edits
from nano_train.run import CONFIG, Run
from nano_train.tree import RunFolder


def edit(
    run: Run,
    step: int,
    out: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    rewards: Mapping[int, float] | None = None,
    completions: Mapping[int, str | list[int]] | None = None,
    seed: int | None = None,
) -> Run:
    """Begin a run that equals another one up to a step, and return it. `train` continues it.

    Args:
        run: The other run, its parent.
        step: First step that differs.
        out: Folder of the new run.
        changes: Values of run.toml by dotted key, from this step on.
        rewards, completions: New reward, and new text or token ids, by the number of a sample of
            this step.
        seed: Seed of the samples of this step.

    Raises:
        ConfigError: A change is invalid, or the run has not come that far.
        RunError: `out` is not empty, or the parent is damaged.
    """
    require_step(run, step)
    if completions and run.task.environment is not None:
        raise ConfigError(
            "completions of an environment cannot be edited, because it rewards its own rollouts; "
            "edit a reward."
        )
    _require_samples(run, {*(rewards or {}), *(completions or {})})
    source = run.folder.path
    merged = {**run.changes, **(changes or {})}
    config = read_config(source / CONFIG, merged)
    folder = RunFolder(out)
    if folder.exists or (out.exists() and any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; choose a new folder.")
    with rebuilt(run, step) as trainer:
        texts = completions or {}
        tokens = {
            number: trainer.engine.tokenizer.encode(text) if isinstance(text, str) else list(text)
            for number, text in texts.items()
        }
        edits = Edits(step, dict(rewards or {}), tokens, seed)
        parent = {"folder": str(source.resolve()), "step": step, "identity": run.identity}
        task = load_task(config, source)
        child = Run(folder, config, task, source / CONFIG, run.code, merged, edits, parent)
        with folder.locked():
            child.begin()
            folder.copy_steps(run.folder, step)
            child.checkpoints.write(trainer.state())
    return child


def _require_samples(run: Run, numbers: set[int]) -> None:
    count = run.config.task.prompts * run.config.task.samples
    for number in sorted(numbers):
        if not 0 <= number < count:
            raise ConfigError(f"sample {number} does not exist; a step has 0 to {count - 1}.")
