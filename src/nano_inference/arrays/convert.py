"""Conversions between host arrays and tensors, in the same memory if possible."""

from typing import Any

import numpy as np

from nano_inference.arrays import host
from nano_inference.arrays.host_array import HostArray
from nano_inference.arrays.namespace import dtype_name, is_tensor, namespace

# dtypes that numpy lacks travel as integers of the same size
_BITS = {1: "uint8", 2: "int16"}


def as_host(value: Any) -> Any:
    """Return an array or tensor as a host array, in the same memory if it is on the host.

    Args:
        value: A numpy array, a torch tensor on any device, or an object with `__dlpack__`.

    Raises:
        TypeError: `value` is something else, or its dtype has no counterpart on the host.
    """
    if isinstance(value, HostArray):
        return value
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="), copy=False).view(HostArray)
    if is_tensor(value):
        return _from_torch(value)
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value).view(HostArray)
        except (BufferError, RuntimeError):  # another device, or bfloat16
            return np.asarray(value).view(HostArray)
    raise TypeError(f"expected an array or a tensor; got {type(value).__name__}.")


def _from_torch(tensor: Any) -> Any:
    name = dtype_name(tensor.dtype)
    dtype = getattr(host, name, None)
    if not isinstance(dtype, np.dtype):
        raise TypeError(
            f"tensors of dtype {name} are not supported; convert the tensor to float32."
        )
    source = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    if dtype.isbuiltin == 1:
        return source.numpy().view(HostArray)
    import torch

    bits = _BITS[dtype.itemsize]
    return source.view(getattr(torch, bits)).numpy().view(dtype).view(HostArray)


def as_torch(array: Any) -> Any:
    """Return a host array as a tensor in the same memory. Tensors are returned unchanged."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    name = array.dtype.name
    plain = array.view(np.ndarray)
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(plain)
    return torch.from_numpy(plain.view(_BITS[array.dtype.itemsize])).view(getattr(torch, name))


def as_like(value: Any, sample: Any) -> Any:
    """Return an array or tensor in the library of `sample`, an array, dtype or device.

    It is in the same memory if possible.
    """
    return as_host(value) if namespace(sample) is host else as_torch(value)
