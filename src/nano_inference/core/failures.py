"""Failures of a device, as opposed to failures of one request."""

from nano_inference.errors import NanoInferenceError, RankLost

# torch's error classes, by name: `core` does not import torch.
OUT_OF_MEMORY = "OutOfMemoryError"
_TORCH_ERRORS = {OUT_OF_MEMORY, "AcceleratorError"}
# Substrings of the plain RuntimeErrors that torch, Triton and CUDA libraries raise.
_SIGNS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "NCCL error")


class DeviceHangs(NanoInferenceError):
    """The device did not finish its work before the deadline."""


class SampleFailure(NanoInferenceError):
    """One sample cannot continue. Its message becomes the sample's `stop_reason`."""


class NoTokenLeft(SampleFailure):
    """Masks forbid every token."""


def is_out_of_memory(problem: BaseException) -> bool:
    """Return True for torch's error that a device has no memory left."""
    return OUT_OF_MEMORY in _kinds(problem)


def is_device_failure(problem: BaseException) -> bool:
    """Return True if a device or another rank failed, rather than a single request.

    Examples are a CUDA error, an allocation failure and a rank that does not answer.
    """
    if isinstance(problem, DeviceHangs | RankLost):
        return True
    if not isinstance(problem, RuntimeError):
        return False
    if _TORCH_ERRORS & _kinds(problem):
        return True
    return any(sign in str(problem) for sign in _SIGNS)


def _kinds(problem: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(problem).__mro__}
