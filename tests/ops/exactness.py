"""How far apart two results may be: in the dtype's own steps."""

import torch
from torch import Tensor


def steps_apart(a: Tensor, b: Tensor) -> int:
    """The largest distance of two tensors of one 16-bit dtype, counted in representable numbers;
    NaN equals NaN.
    """
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan())
    first, second = (_ordered(t.masked_fill(t.isnan(), 0)) for t in (a, b))
    return int((first - second).abs().max()) if a.numel() else 0


def assert_close(a: Tensor, b: Tensor) -> None:
    """float32: within 1e-6 of the number; less: at most its neighbour (Triton's interpreter cuts
    bfloat16 off).

    What is below 1e-30 counts as 0: there float32 loses digits on the way.
    """
    if a.dtype == torch.float32:
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-30, equal_nan=True)
    else:
        assert steps_apart(*(t.masked_fill(t.abs() < 1e-30, 0) for t in (a, b))) <= 1


def _ordered(t: Tensor) -> Tensor:
    bits = t.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
