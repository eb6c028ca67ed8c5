"""Records of a run: its state, the data and figures of a step, edits, errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from nano_inference import TrainingSample
from nano_inference.errors import NanoInferenceError
from nano_train.losses import mean


class RunError(NanoInferenceError):
    """Run that is damaged, in use, or of another configuration or machine."""


class LogprobMismatch(RunError):
    """Step in which trainer and engine computed different bits of a logprob."""


@dataclass(frozen=True)
class State:
    """State of a run between two steps.

    Attributes:
        step: Number of steps done, which is also the position in the questions.
        version: Number of updates of the weights.
        numerics: Description of everything else that decides bits.
        parameters, optimizer: Tensors by name, as `Trainer.state` returns them.
    """

    step: int
    version: int
    numerics: str
    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Data of a step.

    Attributes:
        questions: Number of each question, counted over the run.
        samples: Samples, group by group.
        rewards, advantages: One per sample. Empty without rewards.
    """

    step: int
    questions: list[int]
    samples: list[TrainingSample]
    rewards: list[float] = field(default_factory=list[float])
    advantages: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class Update:
    """Figures of one update of the weights.

    Attributes:
        logprobs: CRC-32 of the trainer's logprobs (or divergences) of each sample before the
            update.
        gradients, parameters: CRC-32 of each gradient before, and of each parameter after the
            update. Empty if the run logs no hashes.
        mismatch: Largest |engine - trainer| of a logprob. None without a comparison.
    """

    loss: float
    logprobs: list[str]
    mismatch: float | None = None
    gradient_norm: float | None = None
    gradients: dict[str, str] = field(default_factory=dict[str, str])
    parameters: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class StepRecord:
    """Figures of a step. All but `seconds` follow from the run's configuration.

    Attributes:
        version: Weight version that sampled.
        reward: Mean reward, None without rewards.
        held_out: Mean reward of greedy answers to the held-out questions, None in most steps.
        kl: Mean log ratio to the reference per token, None without one.
        tokens: Number of trained tokens.
        mismatch: Largest |engine - trainer| of a logprob at the first update.
    """

    step: int
    version: int
    seconds: float
    reward: float | None
    held_out: float | None
    kl: float | None
    loss: float
    tokens: int
    mismatch: float | None


class Step(NamedTuple):
    """A step that is done."""

    record: StepRecord
    batch: Batch
    updates: list[Update]


@dataclass(frozen=True)
class Edits:
    """Changes of the data of one step, for `runs edit`.

    Attributes:
        step: The step.
        rewards: New reward by the number of the sample.
        completions: New completion tokens by the number of the sample.
        seed: Seed of this step in place of the run's.
    """

    step: int = 0
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    completions: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    seed: int | None = None


def record_of(
    batch: Batch, updates: Sequence[Update], version: int, held_out: float | None, seconds: float
) -> StepRecord:
    """Return the figures of a step."""
    samples, first, kl = batch.samples, updates[0], None
    tokens = sum(
        len(sample.completion_tokens) - sample.loss_mask.count(False) for sample in samples
    )
    if samples[0].ref_logprobs is not None:
        pairs = [
            (own, reference)
            for sample in samples
            for own, reference in zip(sample.logprobs, sample.ref_logprobs or (), strict=True)
        ]
        # both are 0 between turns
        kl = math.fsum(own - reference for own, reference in pairs) / tokens
    return StepRecord(
        *(batch.step, version, seconds, mean(batch.rewards) if batch.rewards else None),
        *(held_out, kl, first.loss),
        *(tokens, first.mismatch),
    )
