"""The loss functions, by the client's names. Each is a sum over the targets of one sequence, never
a mean. A batch's loss is the sum over its sequences.

With p the policy's logprobs of the targets, q those of the sampler (`logprobs`), A `advantages`,
r = exp(p - q), sg stop_gradient, and clip to `clip_low_threshold` and `clip_high_threshold`:

    cross_entropy         -sum(p)
    importance_sampling   -sum(r * A)
    ppo                   -sum(min(r * A, clip(r) * A))
    cispo                 -sum(sg(clip(r)) * A * p)
    dro                   -sum(p * A - beta / 2 * (p - q)^2)
    gspo                  -sum(min(s * A, clip(s) * A)),
                          s = exp(mean over sequence_ratio_mask of sg(p) - q) * exp(p - sg(p))

A target's term is multiplied by its `weights` and `mask`, if present. If a factor or the advantage
is 0, the ratio of the target is not computed, so padding in its `logprobs` is never read.

Sources: the client's documentation (https://tinker-docs.thinkingmachines.ai/tinker/losses) for the
formulas and the inputs; its cookbook's tutorial 202 for the thresholds of ppo (0.8, 1.2) and cispo
(0, 4); Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071, for gspo, which is
their GSPO-token, and its thresholds (1 - 3e-4, 1 + 4e-4).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_training_service.errors import Refused

Inputs = Mapping[str, Tensor]  # by name, each in the shape of the targets
Settings = Mapping[str, float]

_FACTORS = ("weights", "mask")
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True)
class Loss:
    """A loss function.

    Attributes:
        targets: Function from the policy's logprobs of the targets, the inputs and the settings to
            each target's term of the loss, in the shape of the logprobs.
        inputs: Names of inputs in addition to `target_tokens`.
        settings: Names in `loss_fn_config`, with their defaults.
        optional: Inputs that may be omitted.
        nonzero: Inputs that must not be 0 everywhere.
    """

    targets: Callable[[Tensor, Inputs, Settings], Tensor]
    inputs: frozenset[str]
    settings: Settings
    optional: frozenset[str] = frozenset()
    nonzero: frozenset[str] = frozenset()

    def compute(self, logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
        """Return the loss of a sequence, a scalar."""
        terms = self.targets(logprobs, inputs, settings)
        for name in _FACTORS:
            if name in inputs:
                terms = terms * inputs[name]
        return terms.sum()


def _cross_entropy(logprobs: Tensor, _inputs: Inputs, _: Settings) -> Tensor:
    return -logprobs


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Return exp(p - q), or 1 for targets whose term is multiplied by 0: exp could overflow."""
    counts = inputs["advantages"] != 0
    for name in _FACTORS:
        if name in inputs:
            counts = counts & (inputs[name] != 0)
    return torch.exp(torch.where(counts, logprobs - inputs["logprobs"], 0.0))


def _importance_sampling(logprobs: Tensor, inputs: Inputs, _: Settings) -> Tensor:
    return -(_ratio(logprobs, inputs) * inputs["advantages"])


def _clipped(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Clip a ratio to the thresholds: per target from the inputs, otherwise from the settings."""
    low, high = (
        inputs[name] if name in inputs else torch.tensor(settings[name], dtype=ratio.dtype)
        for name in (_LOW, _HIGH)
    )
    return ratio.clamp(low, high)


def _pessimistic(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return -min(r * A, clip(r) * A)."""
    advantages = inputs["advantages"]
    clipped = _clipped(ratio, inputs, settings)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return _pessimistic(_ratio(logprobs, inputs), inputs, settings)


def _cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    weight = _clipped(_ratio(logprobs, inputs).detach(), inputs, settings)
    return -(weight * inputs["advantages"] * logprobs)


def _dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    apart = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - settings["beta"] / 2 * apart * apart)


def _gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    counts, constant = inputs["sequence_ratio_mask"] != 0, logprobs.detach()
    log_ratio = (constant - inputs["logprobs"])[counts].mean()
    return _pessimistic(torch.exp(log_ratio + (logprobs - constant)), inputs, settings)


_OFF_POLICY = frozenset(("logprobs", "advantages"))
_OPTIONAL = frozenset(_FACTORS)
_CLIPPED = frozenset((*_FACTORS, _LOW, _HIGH))
_OF_SEQUENCE = frozenset(("sequence_ratio_mask",))
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, _OPTIONAL, {}, _OPTIONAL),
    "importance_sampling": Loss(_importance_sampling, _OFF_POLICY | _OPTIONAL, {}, _OPTIONAL),
    "ppo": Loss(_ppo, _OFF_POLICY | _CLIPPED, {_LOW: 0.8, _HIGH: 1.2}, _CLIPPED),
    "cispo": Loss(_cispo, _OFF_POLICY | _CLIPPED, {_LOW: 0.0, _HIGH: 4.0}, _CLIPPED),
    "dro": Loss(_dro, _OFF_POLICY | _OPTIONAL, {"beta": 0.05}, _OPTIONAL),
    "gspo": Loss(
        _gspo,
        _OFF_POLICY | _OF_SEQUENCE | _CLIPPED,
        {_LOW: 1 - 3e-4, _HIGH: 1 + 4e-4},
        _CLIPPED,
        _OF_SEQUENCE,
    ),
}


def loss_of(name: str, config: Mapping[str, float | str]) -> tuple[Loss, Settings]:
    """Return a loss function and its settings. Raises `Refused` for unknown names and settings."""
    loss = LOSSES.get(name)
    if loss is None:
        raise Refused(f"loss_fn must be one of {', '.join(LOSSES)}; got {name!r}.")
    for key, value in config.items():
        if key not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise Refused(f"loss_fn_config[{key!r}] is not a setting of {name}; it has {known}.")
        if isinstance(value, str) or not math.isfinite(value):
            raise Refused(f"loss_fn_config[{key!r}]={value!r} must be a finite number.")
    return loss, {**loss.settings, **{key: float(value) for key, value in config.items()}}
