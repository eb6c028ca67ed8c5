"""The optimizer of a run, and its state as tensors."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nano_train.config import OptimizerTable

_CHUNK = 2**20  # numbers whose squares are added at once


def make_optimizer(params: Iterable[nn.Parameter], table: OptimizerTable) -> torch.optim.Optimizer:
    """Return the optimizer of a run. Nothing else in this package knows which one it is."""
    return torch.optim.AdamW(
        params,
        lr=table.learning_rate,
        betas=(table.beta1, table.beta2),
        eps=table.epsilon,
        weight_decay=table.weight_decay,
        foreach=False,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, table: OptimizerTable, step: int) -> None:
    """Set the learning rate of a step: constant after a linear rise."""
    rising = min(1.0, (step + 1) / table.warmup_steps) if table.warmup_steps else 1.0
    for group in optimizer.param_groups:
        group["lr"] = table.learning_rate * rising


def clip_gradients(params: Iterable[nn.Parameter], most: float) -> float:
    """Scale gradients down to a norm of at most `most`, and return the norm before.

    Squares are added in float64 in one order, so no bit depends on the number of threads.
    """
    gradients = [param.grad for param in params if param.grad is not None]
    norm = math.sqrt(math.fsum(part for gradient in gradients for part in _squares(gradient)))
    if norm > most:
        for gradient in gradients:
            gradient.mul_(most / norm)
    return norm


def _squares(gradient: Tensor) -> Iterable[float]:
    flat = gradient.detach().cpu().float().contiguous().view(-1).numpy()
    for start in range(0, len(flat), _CHUNK):
        yield float(np.square(flat[start : start + _CHUNK], dtype=np.float64).sum())


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors by `INDEX.NAME`, with the index of the parameter."""
    states: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value).detach()
        for index, values in sorted(states.items())
        for name, value in sorted(values.items())
    }


def load_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Set the optimizer's state to that of `state_tensors`."""
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        states.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(
        {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
    )
