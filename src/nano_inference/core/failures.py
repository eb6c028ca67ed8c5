"""Failures of a device, as opposed to failures of one request."""

from nano_inference.errors import NanoInferenceError, RankLost

# Names of torch's errors: `core` imports no torch.
_TORCH_ERRORS = {"OutOfMemoryError", "AcceleratorError"}
# Texts of plain RuntimeErrors that torch, Triton and CUDA's libraries raise for a device.
_SIGNS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "NCCL error")


class DeviceHangs(NanoInferenceError):
    """The device has not finished its work within the deadline."""


def is_device_failure(problem: BaseException) -> bool:
    """Return whether a device or another rank failed, rather than a single request: out of memory,
    a CUDA error, no answer.
    """
    if isinstance(problem, DeviceHangs | RankLost):
        return True
    if not isinstance(problem, RuntimeError):
        return False
    if _TORCH_ERRORS & {kind.__name__ for kind in type(problem).__mro__}:
        return True
    return any(sign in str(problem) for sign in _SIGNS)
