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

    All devices and machines get equal tables: `cos_sin` uses no function of a library.
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * _inverse_frequencies(spec, spec.turning(head_dim))[None, :]
    cos, sin = (_on(device, table * spec.attention_factor) for table in cos_sin(angles))
    return cos, sin


# pi / 2 = QUARTER + REST, where a multiple of QUARTER by less than 2**20 is exact in float64
QUARTER, REST = 1.57079632673412561417, 6.07710050650619224932e-11
# Coefficients of sine and cosine in [-pi / 4, pi / 4], from fdlibm (k_sin.c, k_cos.c)
_SINE = (
    *(-1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04),
    *(2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10),
)
_COSINE = (
    *(4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05),
    *(-2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11),
)
_BLOCK = 1 << 14  # numbers whose float64 values stay in the cache


def cos_sin(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine of angles below a million, float32 in radians.

    They are computed in float64 and rounded once. Only additions, products and roundings are used,
    so that the bits are the same on every machine: libraries choose their functions by processor.
    """
    cos, sin = np.empty_like(angles), np.empty_like(angles)
    flat, flat_cos, flat_sin = (each.reshape(-1) for each in (angles, cos, sin))
    for start in range(0, flat.size, _BLOCK):
        here = slice(start, start + _BLOCK)
        x = flat[here].astype(np.float64)
        turns = np.rint(x * (2 / math.pi))
        x -= turns * QUARTER
        x -= turns * REST
        square = x * x
        s = x + x * (square * _polynomial(_SINE, square))
        c = 1 - (0.5 * square - square * square * _polynomial(_COSINE, square))
        quarters = turns.astype(np.int64)
        swapped = (quarters & 1).astype(bool)
        flat_cos[here] = np.where(swapped, s, c) * (1 - ((quarters + 1) & 2))
        flat_sin[here] = np.where(swapped, c, s) * (1 - (quarters & 2))
    return cos, sin


def _polynomial(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total *= x
        total += coefficient
    return total


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
