"""Cosine and sine tables of rotary position embedding, for each kind of frequency scaling."""

import math
from typing import NamedTuple

import numpy as np

from nano_inference.arrays import Device, Tensor, namespace
from nano_inference.models.spec.rope import RopeSpec


class Rotation(NamedTuple):
    """Rotation of a layer's heads, by position."""

    cos: Tensor  # float32 [positions, rotated dimensions / 2]
    sin: Tensor  # same shape
    interleaved: bool  # as in `RopeSpec`
    query_scales: Tensor | None  # float32 [positions]: factors of queries


def rotation(spec: RopeSpec, head_dim: int, num_positions: int, device: Device) -> Rotation:
    """Build the tables of one layer's rotary embedding."""
    scales = None
    if spec.query_beta:
        contexts = np.arange(num_positions) // spec.original_max_position
        logs = np.log(1.0 + contexts).astype(np.float32)
        scales = _on(device, 1 + spec.query_beta * logs)
    return Rotation(*rope_table(spec, head_dim, num_positions, device), spec.interleaved, scales)


def rope_table(
    spec: RopeSpec, head_dim: int, num_positions: int, device: Device
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine by position, each float32 [positions, rotated dimensions / 2].

    Computed by numpy, so that all devices get equal tables. Powers, cosines and sines are computed
    in float64 and rounded once, because the float32 functions of libraries differ in the last bit.
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * _inverse_frequencies(spec, spec.turning(head_dim))[None, :]
    tables = (_rounded(np.cos, angles), _rounded(np.sin, angles))
    cos, sin = (_on(device, table * spec.attention_factor) for table in tables)
    return cos, sin


def _rounded(function: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Compute a function of float32 numbers in float64, and round the results to float32."""
    return function(values, np.empty_like(values), dtype=np.float64, casting="same_kind")


def _on(device: Device, table: np.ndarray) -> Tensor:
    return namespace(device).from_numpy(table).to(device)


def _inverse_frequencies(spec: RopeSpec, turning: int) -> np.ndarray:
    exponents = np.arange(0, turning, 2, dtype=np.float32) / np.float32(turning)
    powers = np.power(np.float64(spec.theta), exponents.astype(np.float64)).astype(np.float32)
    base = 1.0 / powers
    if spec.kind == "none":
        return np.zeros_like(base)
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "longrope":
        return base / np.array(spec.factors, dtype=np.float32)
    if spec.kind == "proportional":
        turns = np.arange(len(base)) < int(spec.share * turning // 2)
        return np.where(turns, base / spec.factor, np.float32(0))
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "yarn":
        return _yarn(spec, powers, turning)
    return base


def _llama3(spec: RopeSpec, base: np.ndarray) -> np.ndarray:
    """Llama 3.1: stretch long wavelengths, keep short ones, blend those in between."""
    wavelength = 1.0 / base * (2 * math.pi)
    turns = 1.0 / wavelength * spec.original_max_position
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - blend) * base / spec.factor + blend * base
    stretched = np.where(turns < spec.low_freq_factor, base / spec.factor, base)
    between = (turns >= spec.low_freq_factor) & (turns <= spec.high_freq_factor)
    return np.where(between, blended, stretched)


def _yarn(spec: RopeSpec, powers: np.ndarray, turning: int) -> np.ndarray:
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
    ramp = ((np.arange(turning // 2, dtype=np.float32) - low) / width).clip(0, 1)
    return 1.0 / (spec.factor * powers) * ramp + 1.0 / powers * (1 - ramp)
