"""`Trainer`: an adapter, its optimizer, and its accumulated gradients. One thread calls all
trainers, so a trainer's results depend only on its own requests.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nano_inference.errors import ModelLoadError
from nano_inference.system import read_json
from nano_training_service.base import Policy
from nano_training_service.errors import Refused
from nano_training_service.losses import Inputs, Loss, loss_of
from nano_training_service.messages import AdamParams
from nano_training_service.protobuf import Datum, ForwardBackward

_OPTIMIZER, _STEPS = "optimizer.safetensors", "optimizer.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")
# maximum bytes of a tensor's header without its name, and of a PEFT folder's configuration
_HEADER, _CONFIG = 256, 8192


@dataclass(frozen=True)
class Bounds:
    """Limits of a batch."""

    max_model_len: int
    vocab_size: int
    max_request_tokens: int


@dataclass(frozen=True)
class BatchResult:
    """Logprobs of each sequence's targets, float32 in their shape, and the batch's summed loss."""

    logprobs: list[NDArray[np.float32]]
    loss: float


class Trainer:
    """One model in training.

    A batch that fails changes no gradients. The gradients of the step's other batches are then
    incomplete, so the next `optim_step` is rejected.
    """

    def __init__(self, policy: Policy, bounds: Bounds) -> None:
        self.policy = policy
        self._bounds = bounds
        self._params = dict(policy.named_parameters())
        self._optimizer = self._new_optimizer()
        self._failed = ""  # why the gradients are incomplete

    def run_batch(self, request: ForwardBackward) -> BatchResult:
        """Compute the logprobs and loss of a batch, and accumulate its gradients unless it is
        `forward_only`. Raises `Refused`.
        """
        if request.refusal is not None:
            raise request.refusal
        loss_fn, settings = loss_of(request.loss_fn, request.loss_fn_config)
        sequences = self._check(request.data)
        targets = [datum.inputs["target_tokens"].astype(np.int64) for datum in request.data]
        inputs = [_inputs_of(number, datum, loss_fn) for number, datum in enumerate(request.data)]
        with torch.set_grad_enabled(not request.forward_only):
            logprobs = self.policy.logprobs(sequences, from_position=1, targets=targets)
            losses = [
                loss_fn.compute(each, tensors, settings)
                for each, tensors in zip(logprobs, inputs, strict=True)
            ]
            loss = torch.stack(losses).sum()
        if not request.forward_only:
            self._accumulate(loss)
        values = [each.detach().to("cpu", torch.float32).numpy() for each in logprobs]
        return BatchResult(values, float(loss.detach()))

    def fail_batch(self, problem: str) -> None:
        """Record that a batch of the next step failed."""
        self._failed = self._failed or problem

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Run one step of AdamW and clear the gradients. If it raises `Refused`, the parameters
        are unchanged.
        """
        failed, self._failed = self._failed, ""
        if failed:
            self._clear()  # gradients of the step's other batches
            raise Refused(f"no update was applied, because a batch of this step failed: {failed}")
        tensors = list(self._params.values())
        if any(param.grad is None for param in tensors):
            raise Refused("there are no gradients; send forward_backward before optim_step.")
        gradients = [param.grad for param in tensors if param.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=False)
        if not torch.isfinite(norm):
            self._clear()
            raise Refused("the gradients are not finite; they were dropped, nothing was applied.")
        if params.grad_clip_norm > 0:
            nn.utils.clip_grads_with_norm_(tensors, params.grad_clip_norm, norm, foreach=False)
        for group in self._optimizer.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        self._optimizer.step()
        self._clear()
        return {"grad_norm": float(norm)}

    def drop_gradients(self) -> None:
        """Drop the gradients of a step that timed out. The next step uses only later batches."""
        self._failed = ""
        self._clear()

    def size(self, *, optimizer: bool) -> int:
        """Return the maximum bytes that `save` writes, or `save_adapter` without the optimizer."""
        moments = [
            each[moment]
            for each in self._optimizer.state.values()
            for moment in _MOMENTS
            if optimizer
        ]
        tensors = [*self._params.values(), *moments]
        names = sum(len(name) for name in self._params) * 4  # adapter, moments, steps
        return sum(each.nbytes + _HEADER for each in tensors) + names + _CONFIG

    def save(self, folder: Path) -> None:
        """Write the adapter and the optimizer's state."""
        self.policy.save_pretrained(folder)
        state = {name: self._optimizer.state.get(param) for name, param in self._params.items()}
        steps = {name: int(each["step"]) for name, each in state.items() if each}
        moments: dict[str, Tensor] = {
            f"{moment}.{name}": each[moment].contiguous()
            for name, each in state.items()
            if each
            for moment in _MOMENTS
        }
        save_file(moments, folder / _OPTIMIZER)
        (folder / _STEPS).write_text(json.dumps({"steps": steps}) + "\n", encoding="utf-8")

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter without the optimizer."""
        self.policy.save_pretrained(folder)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load an adapter and, bit for bit, its optimizer's state. With `optimizer=False` the
        optimizer is reset. Gradients are dropped. Raises `Refused` if the optimizer is missing.
        """
        fresh = self._new_optimizer()
        if optimizer:
            self._read_optimizer(fresh, folder)
        self.policy.load(folder)
        self._optimizer = fresh
        self._failed = ""
        self._clear()

    def _new_optimizer(self) -> torch.optim.AdamW:
        # one tensor after another, so that the order of operations is fixed
        return torch.optim.AdamW(list(self._params.values()), foreach=False, fused=False)

    def _read_optimizer(self, optimizer: torch.optim.AdamW, folder: Path) -> None:
        if not (folder / _STEPS).is_file():
            raise Refused("this checkpoint has no optimizer state; load only the weights.")
        steps, moments = read_json(folder / _STEPS)["steps"], load_file(folder / _OPTIMIZER)
        for name, step in steps.items():
            param = self._params.get(name)
            restored = {moment: moments.get(f"{moment}.{name}") for moment in _MOMENTS}
            if param is None or any(
                each is None or each.shape != param.shape for each in restored.values()
            ):
                raise ModelLoadError(
                    f"the optimizer's state of {name} does not match this adapter."
                )
            count = torch.tensor(float(step), dtype=torch.float32)
            optimizer.state[param] = {"step": count, **restored}

    def _accumulate(self, loss: Tensor) -> None:
        tensors = list(self._params.values())
        gradients = torch.autograd.grad(loss, tensors)
        for param, gradient in zip(tensors, gradients, strict=True):
            param.grad = gradient if param.grad is None else param.grad + gradient

    def _clear(self) -> None:
        for param in self._params.values():
            param.grad = None

    def _check(self, data: Sequence[Datum]) -> list[list[int]]:
        """Check a batch and return the sequences to score: input tokens and one more token."""
        if not data:
            raise Refused("the batch is empty.")
        sequences = [self._sequence(number, datum) for number, datum in enumerate(data)]
        total = sum(max(len(datum.tokens), datum.inputs["target_tokens"].size) for datum in data)
        if total > self._bounds.max_request_tokens:
            raise Refused(
                f"the request has {total} tokens (each counts once per target), which exceeds the "
                f"limit of {self._bounds.max_request_tokens} (max_request_tokens)."
            )
        return sequences

    def _sequence(self, number: int, datum: Datum) -> list[int]:
        where, tokens = f"data[{number}]", list(datum.tokens)
        targets = datum.inputs.get("target_tokens")
        if targets is None or targets.dtype != np.int64:
            raise Refused(f"{where} requires target_tokens of dtype int64.")
        if not tokens or len(targets) != len(tokens) or not targets.size:
            raise Refused(
                f"{where} has {len(tokens)} input tokens and target_tokens of shape "
                f"{list(targets.shape)}; send at least one token, and one target or a row of k "
                "targets per token."
            )
        if len(tokens) + 1 > self._bounds.max_model_len:
            raise Refused(
                f"{where} has {len(tokens) + 1} tokens including its last target, which exceeds "
                f"max_model_len={self._bounds.max_model_len}."
            )
        lowest, highest = min(*tokens, targets.min()), max(*tokens, targets.max())
        if not 0 <= lowest <= highest < self._bounds.vocab_size:
            raise Refused(f"{where} contains a token outside [0, {self._bounds.vocab_size}).")
        # Usually the targets are the input shifted by one. Appending the last target then gives the
        # original sequence, in which no token is scored twice.
        return [*tokens, int(targets.flat[-1])]


def _inputs_of(number: int, datum: Datum, loss: Loss) -> Inputs:
    """Return the loss's inputs as float32 tensors. Raises `Refused` if one is missing, unknown,
    not finite, of another shape than the targets, or 0 everywhere although the loss forbids it.
    """
    shape = datum.inputs["target_tokens"].shape
    arrays = {name: each for name, each in datum.inputs.items() if name != "target_tokens"}
    if unknown := sorted(arrays.keys() - loss.inputs):
        raise Refused(
            f"data[{number}] has the unknown input {unknown[0]!r}; this loss accepts "
            f"{', '.join(sorted(loss.inputs)) or 'none'} next to target_tokens."
        )
    if missing := sorted(loss.inputs - loss.optional - arrays.keys()):
        raise Refused(f"data[{number}] lacks the input {missing[0]!r}.")
    for name, values in arrays.items():
        if values.shape != shape or not np.isfinite(values).all():
            raise Refused(
                f"data[{number}]: {name} must be finite numbers of shape {list(shape)}, one for "
                "each target."
            )
        if name in loss.nonzero and not values.any():
            raise Refused(f"data[{number}]: {name} is 0 everywhere; mark at least one token.")
    return {name: torch.from_numpy(values.astype(np.float32)) for name, values in arrays.items()}
