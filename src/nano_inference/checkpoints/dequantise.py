"""Dequantization: one function per format from tensors of codes to float32 numbers.

A matrix is [rows, columns], as in an unquantized checkpoint.
"""

import numpy as np

from nano_inference.arrays import Tensor, is_tensor, namespace

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT4 = np.array([*_E2M1, *(-value for value in _E2M1)], dtype=np.float32)
_FLOAT4_PAIRS = np.stack((np.tile(_FLOAT4, 16), np.repeat(_FLOAT4, 16)), axis=1)  # by byte
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # index within a word of each row's code
_BITSANDBYTES_127TH = 7.874015718698502e-3


def scaled(
    codes: Tensor,
    scales: Tensor,
    rows: int,
    columns: int | Tensor,
    zeros: Tensor | None = None,
) -> Tensor:
    """Subtract zero points from codes, and multiply by scales.

    Args:
        codes: Codes [rows, columns], of any dtype.
        scales: Scales [groups of rows, groups of columns]. The last group may be incomplete.
        rows: Number of rows that share a scale.
        columns: Number of columns that share a scale, or the group of each column [columns].
        zeros: Zero points in units of codes, [groups of rows, groups of columns]. None means 0.
    """
    values = codes.float()
    if zeros is not None:
        values = values - _spread(zeros.float(), values.shape, rows, columns)
    return values * _spread(scales.float(), values.shape, rows, columns)


def _spread(grid: Tensor, shape: tuple[int, ...], rows: int, columns: int | Tensor) -> Tensor:
    """Expand a value per group to a tensor that broadcasts to `shape`."""
    if rows > 1 and grid.shape[0] > 1:
        grid = grid.repeat_interleave(rows, dim=0)[: shape[0]]
    if is_tensor(columns):
        return grid[:, columns]
    if grid.shape[1] > 1:
        grid = grid.repeat_interleave(columns, dim=1)[:, : shape[1]]
    return grid


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned codes from words, lowest bits first.

    int32 [..., n] -> int32 [..., n * 32 / bits].
    """
    xp = namespace(words)
    shifts = xp.arange(0, 32, bits, dtype=xp.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def gptq_zeros(words: Tensor, bits: int, offset: int) -> Tensor:
    """Unpack zero points of AutoGPTQ's and gptqmodel's layout.

    Args:
        words: Packed zero points, int32 [groups, rows * bits / 32].
        bits: Bits per code.
        offset: Number to add to each zero point: 1 in the first version of the layout. Packers of
            that version subtract 1 from whole words, so a zero point of 0 borrows from its
            neighbor. Adding the number to whole words reverses the borrow.

    Returns int32 [groups, rows].
    """
    every = sum(1 << shift for shift in range(0, 32, bits))  # a 1 in each code of a word
    xp = namespace(words)
    return unpacked(words + xp.tensor(offset * every, dtype=xp.int32), bits)


def awq(words: Tensor) -> Tensor:
    """Unpack 4-bit codes or zero points of AutoAWQ's layout "gemm".

    int32 [n, rows / 8] -> int32 [n, rows].
    """
    return unpacked(words, 4).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2)


def bitsandbytes_scales(maxima: Tensor) -> Tensor:
    """Return the scales of LLM.int8(), whose code 127 is the row's maximum.

    float32 [rows] -> float32 [rows, 1].
    """
    return (maxima.float() * _BITSANDBYTES_127TH).unsqueeze(1)


def bitsandbytes_4bit(packed: Tensor, values: Tensor, maxima: Tensor, block: int) -> Tensor:
    """Dequantize NF4 or FP4: numbers from a table, times the maximum of their block.

    Args:
        packed: Bytes of two codes, uint8 [n]. The first code is in the high half.
        values: Number for each code, float32 [16].
        maxima: Maximum of each block, float32 [blocks].
        block: Numbers per block. The last block may be incomplete.

    Returns float32 [2n].
    """
    codes = namespace(packed).stack((packed >> 4, packed & 15), dim=-1).flatten()
    return values.float()[codes.int()] * maxima.repeat_interleave(block)[: len(codes)]


def bitsandbytes_maxima(
    codes: Tensor, values: Tensor, maxima: Tensor, offset: float, block: int
) -> Tensor:
    """Dequantize maxima that are themselves quantized ("nested").

    Args:
        codes: Codes of the maxima, uint8 [n].
        values: Number for each code, float32 [256].
        maxima: Maximum of each block of codes, float32 [blocks].
        offset: Number added to each result.
        block: Codes per block.
    """
    return values.float()[codes.int()] * maxima.repeat_interleave(block)[: len(codes)] + offset


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize OCP's microscaling format: 4-bit floats (e2m1) with an exponent per 32 numbers.

    Args:
        blocks: Bytes of two numbers, uint8 [..., groups, 16]. The first number is in the low half.
        scales: e8m0 exponents, uint8 [..., groups].

    Returns float32 [..., groups * 32].
    """
    return (float4(blocks) * float8_exponents(scales).unsqueeze(-1)).flatten(-2)


def float4(packed: Tensor) -> Tensor:
    """Decode e2m1 numbers, two per byte, the first in the low half.

    uint8 [..., n] -> float32 [..., 2n].
    """
    return namespace(packed).from_numpy(_FLOAT4_PAIRS).to(packed.device)[packed.int()].flatten(-2)


def float8_exponents(scales: Tensor) -> Tensor:
    """Decode e8m0 numbers to float32 of the same shape: e is 2^(e - 127), and 255 is NaN."""
    return scales.view(namespace(scales).float8_e8m0fnu).float()
