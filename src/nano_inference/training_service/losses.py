"""The loss functions, by the client's names. Each is a sum over the tokens of one sequence, never
a mean; a batch's loss is the sum of its sequences'.

With p the policy's logprobs of the targets, q those of the sampler, A advantages, r = exp(p - q):

    cross_entropy         -sum(weights * p)
    importance_sampling   -sum(r * A)
    ppo                   -sum(min(r * A, clip(r, low, high) * A))
    cispo                 -sum(stop_gradient(clip(r, low, high)) * A * p)
    dro                   -sum(p * A - beta / 2 * (p - q)^2)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.training_service.errors import Refused

Inputs = Mapping[str, Tensor]  # by name, each [n]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """A loss function.

    Attributes:
        compute: from the policy's logprobs [n], inputs and settings to a scalar.
        inputs: beside `target_tokens`; those of `optional` may be left out.
        settings: names of `loss_fn_config`, with their defaults.
    """

    compute: Callable[[Tensor, Inputs, Settings], Tensor]
    inputs: frozenset[str]
    settings: Settings
    optional: frozenset[str] = frozenset()


def _cross_entropy(logprobs: Tensor, inputs: Inputs, _: Settings) -> Tensor:
    return -(logprobs * inputs["weights"] if "weights" in inputs else logprobs).sum()


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _importance_sampling(logprobs: Tensor, inputs: Inputs, _: Settings) -> Tensor:
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def _clipped(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages).sum()


def _cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    weight = _clipped(_ratio(logprobs, inputs).detach(), settings)
    return -(weight * inputs["advantages"] * logprobs).sum()


def _dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    apart = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - settings["beta"] / 2 * apart * apart).sum()


_OFF_POLICY = frozenset(("logprobs", "advantages"))
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, frozenset(("weights",)), {}, frozenset(("weights",))),
    "importance_sampling": Loss(_importance_sampling, _OFF_POLICY, {}),
    "ppo": Loss(_ppo, _OFF_POLICY, _CLIPS),
    "cispo": Loss(_cispo, _OFF_POLICY, _CLIPS),
    "dro": Loss(_dro, _OFF_POLICY, {"beta": 0.05}),
}


def loss_of(name: str, config: Mapping[str, float | str]) -> tuple[Loss, Settings]:
    """A loss function and its settings. Raises `Refused` for a name or a setting unknown."""
    loss = LOSSES.get(name)
    if loss is None:
        raise Refused(f"loss_fn={name!r} is not one of this service's: {', '.join(LOSSES)}.")
    for key, value in config.items():
        if key not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise Refused(f"loss_fn_config[{key!r}] means nothing to {name}, which has {known}.")
        if isinstance(value, str) or not math.isfinite(value):
            raise Refused(f"loss_fn_config[{key!r}]={value!r} must be a finite number.")
    return loss, {**loss.settings, **{key: float(value) for key, value in config.items()}}
