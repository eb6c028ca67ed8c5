"""`namespace`: the functions that create and combine arrays of the caller's kind.

Code that runs on GPUs and on CPUs alike writes `namespace(x).empty(...)` with an array, a dtype or
a device of the batch at hand. The result is the module `torch`, or `arrays.host` for the host's
arrays. Python's array API standard calls the same idiom `xp`.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from nano_inference.arrays import host
from nano_inference.arrays.host_array import HostDevice

P = ParamSpec("P")
R = TypeVar("R")
_HOST_KINDS = (np.ndarray, np.dtype, HostDevice)
_HOST = cast("Any", host)


def namespace(sample: Any) -> Any:
    """Return `arrays.host` for an array, dtype or device of the host, and otherwise `torch`."""
    if isinstance(sample, _HOST_KINDS):
        return _HOST
    import torch

    return torch


def torch_cpu() -> Any:
    """Return torch's device for the CPU."""
    import torch

    return torch.device("cpu")


def is_tensor(value: Any) -> bool:
    """Return True for a host array or a torch tensor."""
    torch = _loaded_torch()
    return isinstance(value, np.ndarray) or (torch is not None and torch.is_tensor(value))


@cache
def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype without its library, such as `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def has_dtype(array: Any, dtype: Any) -> bool:
    """Return True if an array or weight has a dtype, given by its name or from either library."""
    return dtype_name(array.dtype) == (dtype if isinstance(dtype, str) else dtype_name(dtype))


def dtype_for(sample: Any, dtype: Any) -> Any:
    """Return the dtype of the same name from the library of an array, dtype or device."""
    return getattr(namespace(sample), dtype_name(dtype))


def is_floating(dtype: Any) -> bool:
    """Return True for dtypes of real numbers."""
    if isinstance(dtype, np.dtype):
        return dtype.kind == "f" or "float" in dtype.name
    return dtype.is_floating_point


def on_device(device: Any) -> AbstractContextManager[Any]:
    """Make a GPU the current device, on which Triton launches kernels. Do nothing for a CPU."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.device(device)


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that torch records no gradients in it."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        torch = _loaded_torch()
        if torch is None:
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run


def _loaded_torch() -> Any:
    """Return torch if this process has imported it.

    While another thread imports it, there are no tensors yet, and its functions may be missing.
    """
    torch = sys.modules.get("torch")
    is_partial = getattr(getattr(torch, "__spec__", None), "_initializing", False)
    return None if is_partial else torch
