"""Helpers shared by the trainer tests: engines, sequences, losses and the bits of tensors."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.rl import LoraPolicy, PolicyModel

# Several lengths: two share a prefix, one is a prefix of another, and one occurs twice.
SEQUENCES = [
    [3 + (7 * i * j) % 250 for i in range(n)]
    for j, n in ((1, 40), (2, 33), (3, 5), (1, 50), (4, 90), (2, 33))
]


def build(model: Path, **options: Any) -> InferenceEngine:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24}
    return InferenceEngine(EngineConfig(model_path=str(model), **(defaults | options)))


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().view(torch.int32).tolist()


def coefficients(lengths: list[int], seed: int = 0) -> list[Tensor]:
    """Return the loss coefficient of each logprob; some are 0."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(length, generator=generator) for length in lengths]
    return [torch.where(each > 1, 0.0, each) for each in drawn]


def weighted_sum(logprobs: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Return a loss linear in the logprobs. First tokens have no logprob and are skipped."""
    return torch.stack(
        [(own[1:] * each[1:]).sum() for own, each in zip(logprobs, weights, strict=True)]
    ).sum()


def gradients(
    model: PolicyModel | LoraPolicy, sequences: list[list[int]] = SEQUENCES, **options: Any
) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs = model.logprobs(sequences, **options)
    weighted_sum(logprobs, coefficients([len(each) for each in logprobs])).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
