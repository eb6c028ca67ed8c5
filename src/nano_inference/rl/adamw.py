"""`AdamW` and clipping with the same bits on every machine and for any number of threads."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nano_inference.errors import ConfigError
from nano_inference.ops.cpu.gradients import AdamRule, GradientKernels
from nano_inference.ops.cpu.library import load

_EPS = 1e-6  # added to a norm that divides, as in torch.nn.utils.clip_grad_norm_
_DTYPES = (torch.float32, torch.bfloat16)
_VARIANTS = ("foreach", "capturable", "differentiable", "fused")


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` (arXiv:1711.05101) whose bits depend on no instruction set.

    Arguments, parameter groups and states are torch's: either optimizer loads the other's
    `state_dict`. Numbers are computed in float32 by the engine's kernels. Raises `ConfigError` for
    arguments that choose one of torch's implementations, and for parameters that are not contiguous
    float32 or bfloat16 on the CPU.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of the means of gradients and of their squares.
        eps: Added to the root of the mean square.
        weight_decay: Decay of the parameters, times the learning rate.
        amsgrad: Divide by the largest mean square so far (AMSGrad).
        maximize: Climb instead of descending.
        max_grad_norm: Largest norm of all gradients together; longer ones are scaled down to it as
            by `clip_grad_norm_`, without a change of `.grad`. None: no limit.
        foreach: Only None or False.
        capturable: Only False.
        differentiable: Only False.
        fused: Only None or False.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        chosen = dict(zip(_VARIANTS, (foreach, capturable, differentiable, fused), strict=True))
        for name, value in chosen.items():
            if value:
                raise ConfigError(
                    f"{name}={value} chooses an implementation of torch, whose bits depend on the "
                    "machine; omit it or use torch.optim.AdamW."
                )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm={max_grad_norm} must be above 0 or None.")
        super().__init__(
            *(params, lr, betas, eps, weight_decay, amsgrad), maximize=maximize, foreach=False
        )
        self.max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Update the parameters that have gradients. Return the result of `closure`, which is
        called first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owned = [param for group in self.param_groups for param in group["params"]]
        params = _with_gradients(owned)
        share = 1.0
        if self.max_grad_norm is not None:
            share = _share(_norm(params), self.max_grad_norm)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group, share)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any], share: float) -> None:
        state = self.state[param]
        if not state:
            names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else ()))
            state["step"] = torch.tensor(0.0)
            state |= {name: torch.zeros_like(param) for name in names}
        state["step"] += 1
        moments = {"mean": state["exp_avg"], "square": state["exp_avg_sq"]}
        if group["amsgrad"]:
            moments["largest"] = state["max_exp_avg_sq"]
        gradient = param.grad
        assert gradient is not None
        rule = _rule(group, int(state["step"]), share)
        _kernels(param.dtype).adam_step(param, gradient.contiguous(), moments, rule)


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients so that their common norm is at most `max_norm`. Return the norm before.

    As `torch.nn.utils.clip_grad_norm_` for the Euclidean norm, with the same bits on every machine.
    Raises `ConfigError` like `AdamW`.
    """
    if not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm} must be above 0.")
    params = _with_gradients([parameters] if isinstance(parameters, Tensor) else [*parameters])
    norm = _norm(params)
    share = _share(norm, max_norm)
    for param in params:
        assert param.grad is not None
        param.grad.mul_(share)
    return torch.tensor(norm)


def _with_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have gradients. Raises `ConfigError` and `RuntimeError`."""
    chosen = [param for param in params if param.grad is not None]
    for param in chosen:
        assert param.grad is not None
        if param.grad.is_sparse:
            raise RuntimeError("AdamW does not support sparse gradients; use dense ones.")
        if param.device.type != "cpu" or param.dtype not in _DTYPES or not param.is_contiguous():
            raise ConfigError(
                f"a parameter {tuple(param.shape)} is {param.dtype} on {param.device}; it must be "
                "contiguous float32 or bfloat16 on the CPU. Use torch.optim.AdamW for others."
            )
    return chosen


def _norm(params: Iterable[Tensor]) -> float:
    total = 0.0
    for param in params:
        assert param.grad is not None
        total += _kernels(param.dtype).sum_of_squares(param.grad.detach().contiguous())
    return math.sqrt(total)


def _share(norm: float, most: float) -> float:
    """Return the factor that clips gradients of this norm: NaN stays NaN, as in torch."""
    share = most / (norm + _EPS)
    return 1.0 if share > 1 else share


def _rule(group: dict[str, Any], step: int, share: float) -> AdamRule:
    (first, second), lr = group["betas"], float(group["lr"])
    return AdamRule(
        decay=1 - lr * group["weight_decay"],
        mean_share=1 - first,
        square_decay=second,
        square_share=1 - second,
        step_size=lr / (1 - _power(first, step)),
        root_divisor=math.sqrt(1 - _power(second, step)),
        eps=group["eps"],
        factor=-share if group["maximize"] else share,
    )


def _power(base: float, exponent: int) -> float:
    """Return a power by products only: a library's pow may change with its version."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


def _kernels(dtype: torch.dtype) -> GradientKernels:
    return GradientKernels(load(), dtype, torch.get_num_threads())
