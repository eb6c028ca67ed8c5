"""What a failed step means: whether the device is to blame, and what to change."""

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from nano_inference.config import EngineConfig

# How torch, Triton and CUDA's libraries begin what they say of a device, where they raise a plain RuntimeError.
_OF_THE_DEVICE = re.compile(r"CUDA (driver )?error|Triton Error \[CUDA\]|CU(BLAS|DNN|SPARSE)_STATUS_|NCCL error")


def is_device_fault(problem: BaseException) -> bool:
    """Whether the device is to blame, and no request's own sample: an illegal access, or no memory left.

    CUDA tells of a fault in any later call, so whoever happens to make that one is not the one at fault.
    """
    if isinstance(problem, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(problem, RuntimeError) and _OF_THE_DEVICE.search(str(problem)) is not None


@dataclass(frozen=True)
class FaultGuard:
    """What a loop has to know of its device."""

    config: EngineConfig
    device: torch.device

    def explain(self, problem: Exception) -> str:
        """Why an engine has died of what a step raised."""
        return reason(problem, self.config)

    def current(self) -> AbstractContextManager[object]:
        """In here the device is the current one: kernels of Triton go there, whichever thread launches them."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def reason(problem: Exception, config: EngineConfig) -> str:
    """Why an engine has died of what a step raised; out of memory, which settings to change and to what."""
    if isinstance(problem, torch.OutOfMemoryError):
        share, tokens = config.gpu_memory_utilization, config.max_tokens_per_batch
        advice = [f"gpu_memory_utilization from {share:g} to {max(share - 0.05, share / 2):.2f}"]
        if tokens > 1:
            advice.append(f"max_tokens_per_batch from {tokens} to {tokens // 2}")
        return f"a step ran out of the device's memory; lower {' or '.join(advice)} ({_first_line(problem)})"
    if is_device_fault(problem):
        return f"a step failed on the device, which this process cannot use any more: {_first_line(problem)}"
    return f"a step failed: {type(problem).__name__}: {problem}"


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0].rstrip('.')}" if lines else type(problem).__name__
