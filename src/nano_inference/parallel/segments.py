"""Sums in a fixed order, so that 1, 2, 4 and 8 ranks compute the same bits."""

from collections.abc import Sequence
from typing import Any

from nano_inference.arrays import Tensor, is_tensor


def tree_sum(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the float32 sum of 1, 2, 4, 8 … tensors, or of a tensor's rows, neighbors first.

    The order is ((p0 + p1) + (p2 + p3)) + …
    """
    if len(parts) & (len(parts) - 1) or not len(parts):
        raise ValueError(f"a tree sum needs 1, 2, 4, 8 … parts; got {len(parts)}.")
    level: Any = parts
    level = level.float() if is_tensor(parts) else [part.float() for part in parts]
    while len(level) > 1:
        if is_tensor(level):
            level = level[::2] + level[1::2]
        else:
            level = [level[index] + level[index + 1] for index in range(0, len(level), 2)]
    return level[0]
