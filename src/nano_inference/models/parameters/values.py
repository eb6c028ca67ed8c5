"""Reading and writing the numbers of parameters by the names of the checkpoint."""

from typing import Any

import torch
from torch import Tensor

from nano_inference.models.parameters.slots import Slot
from nano_inference.models.parameters.storage import form_of

# What a weight may be stored as, or sent as. Integers, booleans and floats of eight bits are codes
# of a quantisation: without their scales they are other numbers.
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has its numbers in memory, as they are: kernels read them there. A DTensor
    has none of its own.
    """
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_neg():
        return False
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def write(params: dict[str, Any], slot: Slot, tensor: Tensor) -> None:
    """Copy this rank's part of one checkpoint tensor (`Slot.take`) into its place, in place, cast
    to the parameter's dtype; then, where the parameter is quantised, to codes.
    """
    param = params[slot.param]
    if isinstance(param, Tensor):
        param.narrow(0, slot.start, slot.local_shape[0]).copy_(tensor)
    else:
        # so that a trainer may send more digits than the model's dtype has, or not
        param.write(slot.start, tensor if form_of(param) is None else tensor.to(param.dtype))


def patch(params: dict[str, Any], slot: Slot, indices: Tensor, values: Tensor) -> None:
    """Change single numbers of this rank's part of one checkpoint tensor in place: flat row-major
    `indices` int64 [n], `values` [n]. Not of quantised parameters.
    """
    param = params[slot.param]
    if isinstance(param, Tensor):
        flat = param.narrow(0, slot.start, slot.local_shape[0]).view(-1)
        flat.index_copy_(0, indices.to(flat.device), values.to(flat.device, flat.dtype))
    else:
        param.patch(slot.start, indices, values)


def read(params: dict[str, Any], slot: Slot) -> Tensor:
    """What this rank holds of one checkpoint tensor, in the parameter's dtype: a view, or a copy
    where weights are packed; of codes what they stand for.
    """
    param, rows = params[slot.param], slot.local_shape[0]
    if isinstance(param, Tensor):
        return param.narrow(0, slot.start, rows)
    return param.read(slot.start, rows)


def as_held(params: dict[str, Any], slot: Slot, tensor: Tensor) -> Tensor:
    """What `read` would give once `write` had been given this tensor, on the parameter's device.
    Nothing is written.
    """
    param = params[slot.param]
    if form_of(param) is None:
        return tensor.to(param.device, param.dtype)
    scratch = {slot.param: param.clone()}
    write(scratch, slot, tensor)
    return read(scratch, slot)
