"""Tensors of two broadcasts."""

import torch


def sent() -> list[torch.Tensor]:
    """Return the tensors of the two broadcasts."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(64, 8, generator=generator), torch.randn(64, generator=generator)]
