"""The optimizer of a run, and its state as tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nano_inference.rl import AdamW, clip_grad_norm_
from nano_train.config import OptimizerTable


def make_optimizer(params: Iterable[nn.Parameter], table: OptimizerTable) -> torch.optim.Optimizer:
    """Return the optimizer of a run. Nothing else in this package knows which one it is.

    On CPUs its bits do not depend on the processor. On a GPU it is torch's.
    """
    params = list(params)
    kind = AdamW if _on_cpus(params) else torch.optim.AdamW
    return kind(
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
    """Scale gradients down to a norm of at most `most`, and return the norm before."""
    params = list(params)
    clip = clip_grad_norm_ if _on_cpus(params) else nn.utils.clip_grad_norm_
    return float(clip(params, most))


def _on_cpus(params: Iterable[nn.Parameter]) -> bool:
    return all(param.device.type == "cpu" for param in params)


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
