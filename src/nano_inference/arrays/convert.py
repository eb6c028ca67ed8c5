"""Conversions between host arrays and tensors, in the same memory if possible."""

from typing import Any, cast

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
        dtype = _supported(value.dtype.name)
        return cast("HostArray", value.astype(dtype, copy=False).view(HostArray))
    if is_tensor(value):
        return _from_torch(value)
    if hasattr(value, "__dlpack__"):
        try:
            return as_host(np.from_dlpack(value))
        except (BufferError, RuntimeError) as error:  # its dtype or device is unknown to numpy
            read = np.asarray(value)
            if read.dtype == object:
                raise TypeError(
                    f"numpy cannot read this {type(value).__name__}: {error}"
                ) from error
            return as_host(read)
    raise TypeError(f"expected an array or a tensor; got {type(value).__name__}.")


def _from_torch(tensor: Any) -> HostArray:
    dtype = _supported(dtype_name(tensor.dtype))
    source = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    if dtype.isbuiltin == 1:
        return source.numpy().view(HostArray)
    import torch

    bits = _BITS[dtype.itemsize]
    return source.view(getattr(torch, bits)).numpy().view(dtype).view(HostArray)


def of_kind(sample: Any, value: Any) -> Any:
    """Return an array or tensor as the kind of `sample`: an array, a dtype or a device."""
    return as_host(value) if namespace(sample) is host else as_torch(value)


def _supported(name: str) -> "np.dtype[Any]":
    """Return the dtype of a host array by its name."""
    dtype = getattr(host, name, None)
    if not isinstance(dtype, np.dtype):
        raise TypeError(f"arrays of dtype {name} are not supported; convert the array to float32.")
    return dtype


def as_torch(array: Any) -> Any:
    """Return a host array as a tensor in the same memory. Tensors are returned unchanged."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    array = as_host(array)
    name = array.dtype.name
    plain = array.numpy()
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(plain)
    return torch.from_numpy(plain.view(_BITS[array.dtype.itemsize])).view(getattr(torch, name))
