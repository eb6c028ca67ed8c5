"""The first difference of two runs, or of a run and its repetition: step, update, sample, token,
layer.

Every step has a hash of each of its parts. The first part that differs is looked up in the files of
the step: samples are compared token by token, gradients and parameters by name. Gradients flow from
the head to the first layer, so the last layer with another gradient is the first that was computed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nano_inference.errors import ConfigError
from nano_inference.rl import differences
from nano_train.rebuild import rebuilt
from nano_train.records import Batch, LogprobMismatch, RunError, Update
from nano_train.run import Run, hashed, hashes_of
from nano_train.trainer import Trainer

DATA = ("questions", "samples", "rewards", "advantages")
OF_UPDATE = ("logprobs", "loss", "gradients", "parameters")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SHOWN = 3  # names in a sentence


class Finding(NamedTuple):
    """The first difference.

    Attributes:
        part: Part of the step: a name of `DATA` or `OF_UPDATE`.
        update: Number of the update within the step. None: before the updates.
        sample: Number of the sample.
        token: Index in the sample's completion.
        layer: First layer with another gradient, or the only one with other parameters. -1: outside
            the layers.
        names: Parameters that differ.
        text: Both values.
    """

    step: int
    part: str
    update: int | None = None
    sample: int | None = None
    token: int | None = None
    layer: int | None = None
    names: tuple[str, ...] = ()
    text: str = ""

    def __str__(self) -> str:
        where = [f"step {self.step}"]
        for name in ("update", "sample", "token", "layer"):
            value = getattr(self, name)
            if value is not None:
                where.append("outside the layers" if value == -1 else f"{name} {value}")
        detail = f": {self.text}" if self.text else ""
        if self.names:
            more = len(self.names) - _SHOWN
            detail = f": {', '.join(self.names[:_SHOWN])}" + (
                f" and {more} more" if more > 0 else ""
            )
        return f"{', '.join(where)}, {self.part}{detail}"


Step = tuple[Batch, Sequence[Update]]


def compare_runs(first: Run, second: Run) -> Finding | None:
    """Return the first difference of the logs of two runs, or None.

    Raises `ConfigError` if they have no step in common, `RunError` for damaged logs.
    """
    lines = first.folder.steps(), second.folder.steps()
    if not min(map(len, lines)):
        raise ConfigError(f"{first.folder.path} and {second.folder.path} have no step in common.")
    for step, (mine, other) in enumerate(zip(*lines, strict=False)):
        if _hashes(mine) != _hashes(other):
            pair = first.folder.read_batch(step), second.folder.read_batch(step)
            return compare_steps(*pair) or Finding(step, "log", text="files and hashes disagree")
    return None


def repeat(run: Run, first: int = 0, last: int | None = None) -> Finding | None:
    """Compute the steps of a run again, and return the first that differs from the log, or None.

    Args:
        run: The run.
        first: First step to repeat. The state before it comes from `rebuilt`.
        last: Last step to repeat. None: the last one done.
    """
    done = len(run.folder.steps())
    end = done if last is None else min(last + 1, done)
    with rebuilt(run, max(first, run.first)) as trainer:
        for step in range(trainer.step, end):
            logged = run.folder.read_batch(step)
            finding = _altered(run, step, logged) or _repeat_step(trainer, logged)
            if finding is not None:
                return finding
    return None


def repeat_one(run: Run, finding: Finding) -> bool:
    """Return True if the step of a finding has the logged bits when it is repeated."""
    try:
        return repeat(run, finding.step, finding.step) is None
    except RunError:
        return False


def _altered(run: Run, step: int, logged: Step) -> Finding | None:
    """Return a finding if the files of a step are not those whose hashes were logged."""
    line = run.folder.steps()[step]
    batch, updates = logged
    now = {**hashes_of(batch), "updates": [hashed(update) for update in updates]}
    for part in (*DATA, "updates"):
        if line[part] != now[part]:
            return Finding(step, part, text="the files are not those that steps.jsonl describes")
    return None


def _repeat_step(trainer: Trainer, logged: Step) -> Finding | None:
    batch, _ = logged
    again = trainer.collect()
    data = compare_steps((batch, ()), (again, ()))
    if data is not None:
        return data
    try:
        return compare_steps(logged, (again, list(trainer.updates(again))))
    except LogprobMismatch as problem:
        return Finding(batch.step, "logprobs", update=0, text=str(problem))


def compare_steps(first: Step, second: Step) -> Finding | None:
    """Return the first difference of two steps, or None."""
    mine, other = first[0], second[0]
    before, after = hashes_of(mine), hashes_of(other)
    for part in DATA:
        if before[part] != after[part]:
            return _data_finding(part, mine, other)
    for number, (one, two) in enumerate(zip(first[1], second[1], strict=False)):
        finding = _update_finding(mine.step, number, one, two)
        if finding is not None:
            return finding
    if len(first[1]) != len(second[1]):
        return Finding(mine.step, "updates", text=f"{len(first[1])} and {len(second[1])} updates")
    return None


def _data_finding(part: str, mine: Batch, other: Batch) -> Finding:
    step = mine.step
    if part != "samples":
        values = getattr(mine, part), getattr(other, part)
        index = first_difference(*values)
        if index is None:
            return Finding(step, part, text=f"{len(values[0])} and {len(values[1])} values")
        text = f"{values[0][index]!r} and {values[1][index]!r}"
        return Finding(step, part, sample=None if part == "questions" else index, text=text)
    for index, (one, two) in enumerate(zip(mine.samples, other.samples, strict=False)):
        if one.prompt_tokens != two.prompt_tokens:
            return Finding(step, "samples", sample=index, text="the prompts differ")
        changes = differences(one, two)
        if changes:
            field, token, *values = changes[0]
            text = f"{field} {values[0]!r} and {values[1]!r}"
            return Finding(step, "samples", sample=index, token=token, text=text)
        if one.seed != two.seed:
            return Finding(step, "samples", sample=index, text=f"seeds {one.seed} and {two.seed}")
    return Finding(step, "samples", text=f"{len(mine.samples)} and {len(other.samples)} samples")


def _update_finding(step: int, number: int, one: Update, two: Update) -> Finding | None:
    before, after = hashed(one), hashed(two)
    for part in OF_UPDATE:
        if before[part] == after[part]:
            continue
        mine, other = getattr(one, part), getattr(two, part)
        if part == "loss":
            return Finding(step, part, update=number, text=f"{mine!r} and {other!r}")
        if part == "logprobs":
            return Finding(step, part, update=number, sample=first_difference(mine, other))
        names = tuple(name for name in mine if mine[name] != other.get(name))
        layers = {layer_of(name) for name in names}
        common = layers.pop() if len(layers) == 1 else None
        layer = first_computed(names) if part == "gradients" else common
        return Finding(step, part, update=number, layer=layer, names=names)
    return None


def first_difference(mine: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Return the first index at which two sequences differ, or None."""
    pairs = enumerate(zip(mine, other, strict=False))
    return next((index for index, (one, two) in pairs if one != two), None)


def first_computed(names: Sequence[str]) -> int:
    """Return the layer of these parameters whose gradients are computed first: the last one, unless
    the norm or the head after the layers is among them (-1).
    """
    outside = [name for name in names if layer_of(name) == -1]
    if any("embed" not in name for name in outside):
        return -1
    return max(map(layer_of, names), default=-1)


def layer_of(name: str) -> int:
    """Return the layer of a parameter, or -1 if it is in none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else -1


def _hashes(line: Mapping[str, Any]) -> list[Any]:
    updates = [{part: update[part] for part in OF_UPDATE} for update in line["updates"]]
    return [*(line[part] for part in DATA), updates]
