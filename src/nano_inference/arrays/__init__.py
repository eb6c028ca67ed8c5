"""Arrays in the memory of the host, with the interface of torch tensors.

`HostArray` is a numpy array with the methods of `torch.Tensor` that the engine uses. `host` has the
functions. Code that also runs on GPUs chooses between `host` and `torch` by `namespace`.

Imports only from the base modules.
Begin with: namespace.py (the choice), host_array.py.
Tests: tests/arrays.
"""

from nano_inference.arrays.columns import with_columns
from nano_inference.arrays.convert import as_host, as_torch, of_kind
from nano_inference.arrays.host_array import HOST, HostArray
from nano_inference.arrays.names import Device, Dtype, Tensor
from nano_inference.arrays.namespace import (
    dtype_for,
    dtype_name,
    has_dtype,
    is_floating,
    is_tensor,
    namespace,
    on_device,
    torch_cpu,
    without_gradients,
)

__all__ = [
    "HOST",
    "Device",
    "Dtype",
    "HostArray",
    "Tensor",
    "as_host",
    "as_torch",
    "dtype_for",
    "dtype_name",
    "has_dtype",
    "is_floating",
    "is_tensor",
    "namespace",
    "of_kind",
    "on_device",
    "torch_cpu",
    "with_columns",
    "without_gradients",
]
