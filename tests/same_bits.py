"""Comparison of host arrays with tensors."""

from typing import Any

import numpy as np

from nano_inference.arrays import HostArray, as_host


def same(on_host: Any, on_torch: Any) -> bool:
    """Return True if a host array and a tensor have the same dtype and bits. All NaN are equal."""
    assert isinstance(on_host, HostArray)
    both = [on_host, as_host(on_torch)]
    assert both[0].dtype == both[1].dtype
    assert both[0].shape == both[1].shape
    return len({np.where(each != each, np.nan, each).tobytes() for each in both}) == 1
