"""Advantages and the loss of rewarded samples, by the columns of `methods.py`."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nano_inference import TrainingSample
from nano_inference.rl import exact_sum, portable_exp
from nano_train.methods import Method


def mean(values: Sequence[float]) -> float:
    """Return the mean. The sum is exact, so that it has the same bits on every Python."""
    return math.fsum(values) / len(values)


def by_group(rewards: Sequence[float]) -> list[float]:
    """Return rewards minus mean, divided by deviation. 0 if all are equal."""
    middle = mean(rewards)
    deviation = math.sqrt(mean([(reward - middle) ** 2 for reward in rewards]))
    return [(reward - middle) / deviation if deviation else 0.0 for reward in rewards]


def centred(rewards: Sequence[float]) -> list[float]:
    """Return rewards minus mean."""
    middle = mean(rewards)
    return [reward - middle for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of the others."""
    rest = len(rewards) - 1
    return [
        reward - math.fsum([*rewards[:index], *rewards[index + 1 :]]) / rest
        for index, reward in enumerate(rewards)
    ]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "group": by_group,
    "centred": centred,
    "leave-one-out": leave_one_out,
}


def advantages(rewards: Sequence[float], group: int, method: Method) -> list[float]:
    """Return the advantages of samples that follow each other in groups of one size."""
    compute = ADVANTAGES[method.advantage]
    return [
        advantage
        for start in range(0, len(rewards), group)
        for advantage in compute(rewards[start : start + group])
    ]


def sampled(sample: TrainingSample, values: Tensor) -> Tensor:
    """Return the values, one per completion token, at the tokens that the model sampled."""
    return values if all(sample.loss_mask) else values[torch.tensor(sample.loss_mask)]


def reward_loss(
    method: Method,
    samples: Sequence[TrainingSample],
    logprobs: Sequence[Tensor],
    advantages: Sequence[float],
    max_tokens: int,
    kl: float = 0.0,
) -> Tensor:
    """Return the loss of a batch, a float32 scalar with gradients.

    Args:
        method: Row with the ratio, its clip range and the aggregation.
        samples: Samples with the sampler's logprobs and, if `kl` is above 0, the reference's.
            Tokens between two turns (`loss_mask`) do not count.
        logprobs: Logprobs of the policy, float32 [tokens] for each sample.
        advantages: Advantage of each sample.
        max_tokens: Limit of a sample's tokens, for the aggregation `"constant"`.
        kl: Factor of the estimate k3 of KL(policy || reference), as in GRPO's equation 4.
    """
    tokens = sum(len(sample.logprobs) - sample.loss_mask.count(False) for sample in samples)
    weight_of = {
        "token": lambda length: 1 / tokens,
        "sample": lambda length: 1 / (length * len(samples)),
        "constant": lambda length: 1 / (len(samples) * max_tokens),
        "sum": lambda length: 1 / len(samples),
    }[method.aggregation]
    total = torch.zeros(())
    for sample, values, advantage in zip(samples, logprobs, advantages, strict=True):
        current = sampled(sample, values)
        sampler = sampled(sample, torch.tensor(sample.logprobs))
        terms = _terms(method, current, sampler, advantage)
        total = total + exact_sum(terms) * weight_of(len(terms))
        if kl:
            apart = sampled(sample, torch.tensor(sample.ref_logprobs)) - current
            distance = exact_sum(portable_exp(apart) - apart - 1)
            total = total + distance * (kl * weight_of(len(current)))
    return total


def _terms(method: Method, current: Tensor, sampler: Tensor, advantage: float) -> Tensor:
    """Return the terms of one sample: one of each token, or one of the sequence."""
    if method.ratio == "none":
        return -advantage * current
    log_ratio = current - sampler
    if method.ratio == "sequence":
        log_ratio = exact_sum(log_ratio)[None] / len(log_ratio)
    ratio = portable_exp(log_ratio)
    clipped = ratio.clamp(1 - method.clip_low, 1 + method.clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)
