"""The kernels of a backward pass, by backend."""

from collections.abc import Callable
from typing import Any

import torch

from nano_inference.ops.gradients import GradientOps


def _on_cpu(model: Any, dtype: torch.dtype, num_threads: int) -> GradientOps:
    """Return the kernels of the engine's law of sums."""
    from nano_inference.ops.cpu.build import best_instruction_set
    from nano_inference.ops.cpu.gradients import GradientKernels
    from nano_inference.ops.cpu.library import load

    return GradientKernels(load(best_instruction_set(model.ops.sums)), dtype, num_threads)


def _on_cuda(model: Any, dtype: torch.dtype, num_threads: int) -> GradientOps:
    from nano_inference.ops.cuda.gradients import CudaGradients

    return CudaGradients(dtype, model.device)


# Backend -> kernels for a model of an engine, a dtype of products and a number of threads.
KERNELS: dict[str, Callable[[Any, torch.dtype, int], GradientOps]] = {
    "cpu": _on_cpu,
    "cuda": _on_cuda,
}
