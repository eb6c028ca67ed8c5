"""Cosine and sine tables of rotary position embedding, for each kind of frequency scaling."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.models.spec.rope import RopeSpec


class Rotation(NamedTuple):
    """Rotation of a layer's heads, by position."""

    cos: Tensor  # float32 [positions, rotated dimensions / 2]
    sin: Tensor  # same shape
    interleaved: bool  # as in `RopeSpec`
    query_scales: Tensor | None  # float32 [positions]: factors of queries


def rotation(spec: RopeSpec, head_dim: int, num_positions: int, device: torch.device) -> Rotation:
    """Build the tables of one layer's rotary embedding."""
    scales = None
    if spec.query_beta:
        contexts = torch.floor(torch.arange(num_positions) / spec.original_max_position)
        scales = (1 + spec.query_beta * torch.log(1 + contexts)).to(device)
    return Rotation(*rope_table(spec, head_dim, num_positions, device), spec.interleaved, scales)


def rope_table(
    spec: RopeSpec, head_dim: int, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine by position, each float32 [positions, rotated dimensions / 2].

    Computed on the CPU, so that all devices get equal tables.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * _inverse_frequencies(spec, spec.turning(head_dim))[None, :]
    return (
        (angles.cos() * spec.attention_factor).to(device),
        (angles.sin() * spec.attention_factor).to(device),
    )


def _inverse_frequencies(spec: RopeSpec, turning: int) -> Tensor:
    powers = spec.theta ** (torch.arange(0, turning, 2, dtype=torch.float32) / turning)
    base = 1.0 / powers
    if spec.kind == "none":
        return torch.zeros_like(base)
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "longrope":
        return base / torch.tensor(spec.factors, dtype=torch.float32)
    if spec.kind == "proportional":
        turns = torch.arange(len(base)) < int(spec.share * turning // 2)
        return torch.where(turns, base / spec.factor, 0.0)
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "yarn":
        return _yarn(spec, powers, turning)
    return base


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    """Llama 3.1: stretch long wavelengths, keep short ones, blend those in between."""
    wavelength = 2 * math.pi / base
    turns = spec.original_max_position / wavelength
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - blend) * base / spec.factor + blend * base
    stretched = torch.where(turns < spec.low_freq_factor, base / spec.factor, base)
    between = (turns >= spec.low_freq_factor) & (turns <= spec.high_freq_factor)
    return torch.where(between, blended, stretched)


def _yarn(spec: RopeSpec, powers: Tensor, turning: int) -> Tensor:
    """YaRN (arXiv:2309.00071), section 3.2: interpolate slow dimensions, keep fast ones, and blend
    the dimensions in between.
    """

    def dimension(rotations: float) -> float:
        turns = spec.original_max_position / (rotations * 2 * math.pi)
        return turning * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turning - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(turning // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (spec.factor * powers) * ramp + 1.0 / powers * (1 - ramp)
