"""Tensors of two broadcasts."""

import torch


def sent() -> list[torch.Tensor]:
    """Return the tensors of the two broadcasts."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(64, 8, generator=generator), torch.randn(64, generator=generator)]


def layers() -> list[dict[str, torch.Tensor]]:
    """Return the tensors of a trainer that sends layers, by name: a part without any, then parts of
    two dtypes.
    """
    generator = torch.Generator().manual_seed(6)
    parts: list[dict[str, torch.Tensor]] = [{}]
    for layer in range(2):
        weight = torch.randn(5, 3, generator=generator)
        norm = torch.randn(7, generator=generator)
        parts.append(
            {
                f"layers.{layer}.weight": weight.bfloat16(),
                f"layers.{layer}.norm": norm,
                f"layers.{layer}.bias": norm[:5].bfloat16(),
            }
        )
    return parts
