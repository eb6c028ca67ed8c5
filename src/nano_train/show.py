"""A run as text: a line per step, and tables."""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from nano_train.records import StepRecord
from nano_train.run import Run
from nano_train.tree import ORIGIN, RunFolder

_NUMBERS = ("reward", "held_out", "kl", "loss")


def line(record: StepRecord) -> str:
    """Return the figures of a step as a line."""
    parts = [f"step {record.step:3}: {record.seconds:.1f} s"]
    for name in _NUMBERS:
        value = getattr(record, name)
        if value is not None:
            parts.append(f"{name.replace('_', ' ')} {value:.3f}")
    parts.append(f"{record.tokens} tokens")
    if record.mismatch is not None:
        parts.append(f"largest difference to the trainer {record.mismatch:g}")
    return ", ".join(parts)


def runs_in(folder: Path) -> list[RunFolder]:
    """Return all runs directly in a folder, by name."""
    return [RunFolder(path.parent) for path in sorted(folder.glob(f"*/{ORIGIN}"))]


def table_of_runs(folders: list[RunFolder]) -> Table:
    """Return a table with a row for each run."""
    table = _table("run", "method", "steps", "reward", "held out", "mismatch", "state", "parent")
    for folder in folders:
        origin, steps = folder.origin(), folder.steps()
        config, parent = origin["config"], origin["parent"]
        tested = [step["held_out"] for step in steps if step["held_out"] is not None]
        state = state_of(folder, len(steps), config["steps"])
        came = f"{Path(parent['folder']).name}, step {parent['step']}" if parent else ""
        table.add_row(
            *(folder.path.name, config["method"], f"{len(steps)} of {config['steps']}"),
            _number(steps[-1]["reward"] if steps else None),
            _number(tested[-1] if tested else None),
            *(_number(_worst(steps), "g"), state, came),
        )
    return table


def table_of_steps(run: Run) -> Table:
    """Return a table with a row for each step."""
    table = _table(
        *("step", "version", "reward", "held out", "KL", "loss", "length", "mismatch", "parameters")
    )
    size = run.config.task.prompts * run.config.task.samples
    for step in run.folder.steps():
        updates = step["updates"]
        table.add_row(
            *(str(step["step"]), str(step["version"])),
            *(_number(step[name]) for name in _NUMBERS),
            f"{step['tokens'] / size:.1f}",
            _number(step["mismatch"], "g"),
            updates[-1]["parameters"] if updates[-1]["parameters"] else "",
        )
    return table


def table_of_samples(run: Run, step: int) -> Table:
    """Return a table with a row for each sample of a step."""
    batch, _ = run.folder.read_batch(step)
    table = _table("sample", "question", "reward", "advantage", "tokens", "logprob", "completion")
    size = len(batch.samples) // len(batch.questions)
    for index, sample in enumerate(batch.samples):
        text = sample.text if sample.text is not None else str(list(sample.completion_tokens))
        total = sum(sample.logprobs) if sample.logprobs else None
        table.add_row(
            *(str(index), str(batch.questions[index // size])),
            _number(batch.rewards[index] if batch.rewards else None),
            _number(batch.advantages[index] if batch.advantages else None),
            *(str(len(sample.completion_tokens)), _number(total), repr(text)),
        )
    return table


def state_of(folder: RunFolder, done: int, steps: int) -> str:
    """Return the state of a run in a word, from the steps done and configured."""
    return "running" if is_locked(folder) else "complete" if done >= steps else "interrupted"


def is_locked(folder: RunFolder) -> bool:
    """Return True if a process works on a run."""
    try:
        with (folder.path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _worst(steps: list[dict[str, Any]]) -> float | None:
    return max(_mismatches(steps), default=None)


def _mismatches(steps: list[dict[str, Any]]) -> Iterator[float]:
    return (step["mismatch"] for step in steps if step["mismatch"] is not None)


def _number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
