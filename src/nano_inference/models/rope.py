"""Cosine and sine tables of rotary position embedding, for each way of stretching its
frequencies.
"""

import math

import torch
from torch import Tensor

from nano_inference.models.rope_spec import RopeSpec


def rope_table(
    spec: RopeSpec, head_dim: int, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine by position, float32, each [num_positions, head_dim / 2]. Made on the CPU:
    one table for all.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * _inverse_frequencies(spec, head_dim)[None, :]
    return (
        (angles.cos() * spec.attention_factor).to(device),
        (angles.sin() * spec.attention_factor).to(device),
    )


def _inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    powers = spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    base = 1.0 / powers
    if spec.kind == "none":
        return torch.zeros_like(base)
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "longrope":
        return base / torch.tensor(spec.factors, dtype=torch.float32)
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "yarn":
        return _yarn(spec, powers, head_dim)
    return base


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    turns = spec.original_max_position / wavelength
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - blend) * base / spec.factor + blend * base
    stretched = torch.where(turns < spec.low_freq_factor, base / spec.factor, base)
    between = (turns >= spec.low_freq_factor) & (turns <= spec.high_freq_factor)
    return torch.where(between, blended, stretched)


def _yarn(spec: RopeSpec, powers: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv:2309.00071), section 3.2: interpolate slow dimensions, keep fast ones, a ramp
    between them.
    """

    def dimension(rotations: float) -> float:
        turns = spec.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (spec.factor * powers) * ramp + 1.0 / powers * (1 - ramp)
