"""Distance between two results, in steps of their dtype."""

import torch
from torch import Tensor


def steps_apart(a: Tensor, b: Tensor) -> int:
    """Return the largest distance between two tensors of one 16-bit dtype, in representable
    numbers. NaN equals NaN.
    """
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan())
    first, second = (_ordered(t.masked_fill(t.isnan(), 0)) for t in (a, b))
    return int((first - second).abs().max()) if a.numel() else 0


def assert_close(a: Tensor, b: Tensor) -> None:
    """Compare within 1e-6 (relative) for float32, within one step for 16-bit dtypes.

    Triton's interpreter truncates bfloat16. Numbers below 1e-30 count as 0 because float32 loses
    digits there.
    """
    if a.dtype == torch.float32:
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-30, equal_nan=True)
    else:
        assert steps_apart(*(t.masked_fill(t.abs() < 1e-30, 0) for t in (a, b))) <= 1


def _ordered(t: Tensor) -> Tensor:
    bits = t.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
