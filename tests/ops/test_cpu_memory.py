"""Memory that the CPU kernels allocate for weights."""

import pytest
import torch

from nano_inference.ops.cpu.memory import Arena


def test_arena_raises_memory_error_if_there_is_not_enough() -> None:
    arena = Arena()
    with pytest.raises(MemoryError, match="bytes cannot be mapped"):
        arena.take((2**57,), torch.uint8)
    assert arena.take((3,), torch.uint8).tolist() == [0, 0, 0]
