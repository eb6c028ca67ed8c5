"""Why an engine has died, and what to change."""

import torch

from nano_inference.config import EngineConfig
from nano_inference.engine.device import is_device_failure


def reason(problem: Exception, config: EngineConfig) -> str:
    """Why an engine has died of what a step raised; out of memory, which settings to change and to what."""
    if isinstance(problem, torch.OutOfMemoryError):
        share, tokens = config.gpu_memory_utilization, config.max_tokens_per_batch
        advice = [f"gpu_memory_utilization from {share:g} to {max(share - 0.05, share / 2):.2f}"]
        if tokens > 1:
            advice.append(f"max_tokens_per_batch from {tokens} to {tokens // 2}")
        return f"a step ran out of the device's memory; lower {' or '.join(advice)} ({_first_line(problem)})"
    if is_device_failure(problem):
        return f"a step failed on the device, which this process cannot use any more: {_first_line(problem)}"
    return f"a step failed: {type(problem).__name__}: {problem}"


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0].rstrip('.')}" if lines else type(problem).__name__
