"""Reading and writing of parameters by checkpoint name."""

from typing import Any

from nano_inference.arrays import HostArray, Tensor, is_tensor
from nano_inference.models.parameters.slots import Slot
from nano_inference.models.parameters.storage import form_of

# Names of the dtypes in which a weight may be stored or sent. Integers, booleans and 8-bit floats
# are quantized codes, which are meaningless without their scales.
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")


def holds_numbers(tensor: Tensor) -> bool:
    """Return True if a tensor has plain values in its own memory, as kernels need.

    A DTensor does not.
    """
    if isinstance(tensor, HostArray):
        return True
    if str(tensor.layout) != "torch.strided" or tensor.is_meta or tensor.is_neg():
        return False
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def write(params: dict[str, Any], slot: Slot, tensor: Tensor) -> None:
    """Write this rank's part of one checkpoint tensor (`Slot.take`) into its parameter, in place.

    The values are cast to the parameter's dtype and then quantized if the parameter is.
    """
    param = params[slot.param]
    if is_tensor(param):
        param.narrow(0, slot.start, slot.local_shape[0]).copy_(tensor)
    else:
        # quantize from the model's dtype, even if a trainer sends more digits
        param.write(slot.start, tensor if form_of(param) is None else tensor.to(param.dtype))


def patch(params: dict[str, Any], slot: Slot, indices: Tensor, values: Tensor) -> None:
    """Change single numbers of this rank's part of one checkpoint tensor, in place.

    Takes flat row-major `indices` int64 [n] and `values` [n]. Not for quantized parameters.
    """
    param = params[slot.param]
    if is_tensor(param):
        flat = param.narrow(0, slot.start, slot.local_shape[0]).reshape(-1)
        flat.index_copy_(0, indices.to(flat.device), values.to(flat.device, flat.dtype))
    else:
        param.patch(slot.start, indices, values)


def read(params: dict[str, Any], slot: Slot) -> Tensor:
    """Return this rank's part of one checkpoint tensor, in the parameter's dtype.

    The result is a view, or a copy if weights are packed. Codes are dequantized.
    """
    param, rows = params[slot.param], slot.local_shape[0]
    if is_tensor(param):
        return param.narrow(0, slot.start, rows)
    return param.read(slot.start, rows)


def as_held(params: dict[str, Any], slot: Slot, tensor: Tensor) -> Tensor:
    """Return the tensor that `read` would return after `write`, on the parameter's device.

    Nothing is written.
    """
    param = params[slot.param]
    if form_of(param) is None:
        return tensor.to(param.device, param.dtype)
    scratch = {slot.param: param.clone()}
    write(scratch, slot, tensor)
    return read(scratch, slot)
