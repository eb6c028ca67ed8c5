"""Values of an engine as torch's, which trainers compute with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nano_inference.arrays import HOST, Device, Dtype, as_torch, dtype_for, of_kind, torch_cpu
from nano_inference.models.parameters.slots import Slot
from nano_inference.models.parameters.storage import numbers_of
from nano_inference.models.parameters.values import as_held, write
from nano_inference.models.rope import Rotation


def torch_device(device: Device) -> torch.device:
    """Return torch's device for the memory of an engine's device."""
    return torch_cpu() if device is HOST else device


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return torch's dtype for an engine's dtype."""
    return dtype_for(torch_cpu(), dtype)


def numbers(param: Any) -> Tensor:
    """Return a parameter of an engine as a tensor: its own memory, or a copy if it is packed."""
    return as_torch(numbers_of(param))


def rotation(rope: Rotation) -> Rotation:
    """Return a rotation with tensors, in the same memory."""
    scales = rope.query_scales
    return rope._replace(
        cos=as_torch(rope.cos),
        sin=as_torch(rope.sin),
        query_scales=None if scales is None else as_torch(scales),
    )


def held(params: dict[str, Any], slot: Slot, tensor: Tensor) -> Tensor:
    """Return the tensor that an engine's parameters would hold after `write_tensors`."""
    return as_torch(as_held(params, slot, of_kind(params[slot.param].dtype, tensor)))


def write_tensors(
    params: dict[str, Any], slots: Mapping[str, Slot], tensors: Mapping[str, Tensor]
) -> None:
    """Write tensors by checkpoint name into an engine's parameters, as `write` does."""
    for name, tensor in tensors.items():
        slot = slots[name]
        write(params, slot, of_kind(params[slot.param].dtype, tensor.detach()))
