"""Curves of a run: reward, KL and mismatch by step. Requires matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_inference.errors import ConfigError
from nano_train.tree import RunFolder


@dataclass(frozen=True)
class Point:
    """Figures of a step.

    Attributes:
        seconds: Time since the start of the run, without interruptions.
        reward, held_out, kl, mismatch: As in `StepRecord`.
    """

    step: int
    seconds: float
    reward: float
    held_out: float | None
    kl: float | None
    tokens: int
    mismatch: float


def points_of(folder: RunFolder) -> list[Point]:
    """Return the points of a run with rewards. Raises `ConfigError` if there are none."""
    points: list[Point] = []
    seconds = 0.0
    for line, timing in zip(folder.steps(), folder.timings(), strict=False):
        seconds += timing["seconds"]
        if line["reward"] is not None:
            values = {name: line[name] for name in ("step", "reward", "held_out", "kl", "tokens")}
            points.append(Point(seconds=seconds, mismatch=line["mismatch"] or 0.0, **values))
    if not points:
        raise ConfigError(f"{folder.path} has no rewards to draw; run more steps.")
    return points


def plot(points: Sequence[Point], path: Path) -> None:
    """Write a picture of the curves. Raises `ConfigError` without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError as problem:
        raise ConfigError(
            "curves require matplotlib; run: pip install 'nano-inference[plots]'"
        ) from problem
    mpl.use("agg")
    import matplotlib.pyplot as plt

    panels = 3 if points[0].kl is not None else 2
    figure, axes = plt.subplots(1, panels, figsize=(11, 3), layout="constrained", dpi=150)
    reward, *kl, mismatch = axes
    steps = [point.step for point in points]
    _plot_rewards(reward, points)
    for axis in kl:
        axis.plot(steps, [point.kl for point in points], color="#b5563c")
        axis.set(title="KL to the initial policy, a token", xlabel="step")
    mismatch.plot(steps, [point.mismatch for point in points], color="#2a6fdb")
    tokens = sum(point.tokens for point in points)
    mismatch.set(
        title="largest |engine - trainer|", xlabel=f"step ({tokens:,} tokens in all)", ylim=(-1, 1)
    )
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def _plot_rewards(axis: Any, points: Sequence[Point]) -> None:
    steps, rewards = [point.step for point in points], [point.reward for point in points]
    recent = [rewards[max(0, index - 9) : index + 1] for index in range(len(rewards))]
    means = [sum(window) / len(window) for window in recent]
    axis.plot(steps, rewards, ".", color="#bbbbbb", label="training, each step")
    axis.plot(steps, means, color="#7a7a7a", label="training, last 10 steps")
    tested = [point for point in points if point.held_out is not None]
    axis.plot(
        [point.step for point in tested],
        [point.held_out for point in tested],
        "o-",
        color="#2a6fdb",
        label="held out",
    )
    minutes = points[-1].seconds / 60
    axis.set(title=f"reward ({minutes:.1f} minutes)", xlabel="step", ylim=(0, 1.03))
    axis.legend(loc="lower right", frameon=False)
