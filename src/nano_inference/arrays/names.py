"""Names for annotations in code that computes with `HostArray` and `torch.Tensor` alike.

A type checker reads torch's classes, whose interface `HostArray` follows. At run time they are
only names, which signatures in the documentation show, so that annotations do not import torch.
"""

from typing import TYPE_CHECKING, Any, NewType, TypeAlias

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor
    Dtype: TypeAlias = torch.dtype
    Device: TypeAlias = torch.device
else:
    Tensor = NewType("Tensor", Any)
    Dtype = NewType("Dtype", Any)
    Device = NewType("Device", Any)
