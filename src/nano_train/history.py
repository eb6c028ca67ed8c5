"""A run as its files record it. The run's own code is not executed, so you may read any run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from nano_train.checkpoints import Checkpoints
from nano_train.records import Edits, RunError
from nano_train.tree import BATCHES, ORIGIN, STEPS, RunFolder


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TaskRead(_Read):
    """Part of `[task]`: questions of a step, samples of a question."""

    prompts: PositiveInt
    samples: PositiveInt


class ConfigRead(_Read):
    """Part of a configuration, as in `RunConfig`."""

    name: str
    model: str
    method: str
    steps: PositiveInt
    task: TaskRead


class Parent(_Read):
    """Run and step from which an edited run continues."""

    folder: str
    step: NonNegativeInt


class Origin(_Read):
    """Part of origin.json, as `Run` describes it."""

    identity: str
    config: ConfigRead
    changes: dict[str, Any]
    edits: Edits
    parent: Parent | None
    versions: dict[str, str]


class UpdateLine(_Read):
    """Part of an update in steps.jsonl, as in `Update`. `parameters` is a hash."""

    gradient_norm: float | None
    parameters: str


class Line(_Read):
    """Line of steps.jsonl, as in `StepRecord`, with the updates of the step."""

    step: NonNegativeInt
    version: NonNegativeInt
    reward: float | None
    held_out: float | None
    kl: float | None
    loss: float
    tokens: NonNegativeInt
    mismatch: float | None
    updates: list[UpdateLine]

    @property
    def difference(self) -> float:
        """Return the mismatch, -1 without a comparison, and infinity in place of nan."""
        if self.mismatch is None:
            return -1.0
        return math.inf if math.isnan(self.mismatch) else self.mismatch


class Scores(_Read):
    """Part of a file in batches/, as in `Batch`."""

    questions: list[int]
    rewards: list[float]
    advantages: list[float]


class _Timing(_Read):
    step: NonNegativeInt
    seconds: float


@dataclass(frozen=True)
class History:
    """A run's beginning and figures.

    Attributes:
        config: The whole configuration.
        lines: Lines of steps.jsonl.
        seconds: Duration of each step whose time is recorded.
    """

    folder: RunFolder
    origin: Origin
    config: Mapping[str, Any]
    lines: list[Line]
    seconds: Mapping[int, float]

    @property
    def samples_of_a_step(self) -> int:
        """Number of samples that a step has by the configuration."""
        return self.origin.config.task.prompts * self.origin.config.task.samples

    def checkpoint(self) -> tuple[int, str] | None:
        """Return step and SHA-256 of the parameters of the last checkpoint, or None without one.
        Raises `RunError`.
        """
        checkpoints = Checkpoints(self.folder, self.origin.identity)
        steps = checkpoints.steps()
        if not steps:
            return None
        return steps[-1], str(checkpoints.about(steps[-1]).get("parameters_sha256"))

    def scores(self, step: int) -> Scores:
        """Return rewards and advantages of a step. Raises `RunError`."""
        path = self.folder.path / BATCHES / f"{step}.json"
        return _valid(Scores, self.folder.read_scores(step), path)


def read_history(path: Path) -> History:
    """Read a run's folder. Raises `RunError`, with the file, if it is not a run or is damaged."""
    folder = RunFolder(path)
    content = folder.origin()
    origin = _valid(Origin, content, path / ORIGIN)
    lines = _valid(list[Line], folder.steps(), path / STEPS)
    timings = _valid(list[_Timing], folder.timings(), path / "timings.jsonl")
    seconds = {timing.step: timing.seconds for timing in timings}
    return History(folder, origin, content["config"], lines, seconds)


def _valid(kind: Any, content: Any, path: Path) -> Any:
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["loc"] and isinstance(first["loc"][0], int):
            rest = ".".join(map(str, first["loc"][1:]))
            where = f"line {first['loc'][0] + 1}" + (f", {rest}" if rest else "")
        text = first["msg"].removeprefix("Input ").removesuffix(".")
        raise RunError(
            f"{path} is damaged: {where}: {text[:1].lower()}{text[1:]}; restore it."
        ) from None
