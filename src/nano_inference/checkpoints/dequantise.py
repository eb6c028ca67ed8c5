"""From the codes of a quantisation to the numbers that they stand for, in float32: one function a
format, of tensors alone. A matrix is [rows, columns] as in a checkpoint that is not quantised.
"""

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT4 = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
_FLOAT4_PAIRS = torch.stack((_FLOAT4.repeat(16), _FLOAT4.repeat_interleave(16)), dim=1)  # by byte
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of a word's eight codes is that of each row
_BITSANDBYTES_127TH = 7.874015718698502e-3


def scaled(
    codes: Tensor,
    scales: Tensor,
    rows: int,
    columns: int | Tensor,
    zeros: Tensor | None = None,
) -> Tensor:
    """Codes less their zero points, times their scales.

    Args:
        codes: [rows, columns], of any dtype.
        scales: [groups of rows, groups of columns]; the last of each may be cut short.
        rows: how many of them share a scale.
        columns: likewise; or, [columns], the group of each.
        zeros: in the codes' terms, [groups of rows, groups of columns]; None: 0.
    """
    values = codes.float()
    if zeros is not None:
        values = values - _spread(zeros.float(), values.shape, rows, columns)
    return values * _spread(scales.float(), values.shape, rows, columns)


def _spread(grid: Tensor, shape: torch.Size, rows: int, columns: int | Tensor) -> Tensor:
    """A value for each group, as what broadcasts to `shape`."""
    if rows > 1 and grid.shape[0] > 1:
        grid = grid.repeat_interleave(rows, dim=0)[: shape[0]]
    if isinstance(columns, Tensor):
        return grid[:, columns]
    if grid.shape[1] > 1:
        grid = grid.repeat_interleave(columns, dim=1)[:, : shape[1]]
    return grid


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes without a sign, several in a word, the first in its lowest bits: int32 [..., n] ->
    int32 [..., n * 32 / bits].
    """
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> places) & ((1 << bits) - 1)).flatten(-2)


def gptq_zeros(words: Tensor, bits: int, offset: int) -> Tensor:
    """Zero points of AutoGPTQ's and gptqmodel's layout.

    Args:
        words: int32 [groups, rows * bits / 32].
        bits: of a code.
        offset: what the zero points lack: 1 in the first version of the layout. It is taken off
            there from whole words, so a 0 borrows from its neighbour, and is given back so.

    Returns int32 [groups, rows].
    """
    every = sum(1 << place for place in range(0, 32, bits))  # a 1 in each code of a word
    return unpacked(words + torch.tensor(offset * every).int(), bits)


def awq(words: Tensor) -> Tensor:
    """Codes or zero points of AutoAWQ's layout "gemm", of 4 bits: int32 [n, rows / 8] -> int32
    [n, rows].
    """
    return unpacked(words, 4).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2)


def bitsandbytes_scales(maxima: Tensor) -> Tensor:
    """LLM.int8()'s: codes of which 127 is the row's maximum: float32 [rows] -> float32
    [rows, 1].
    """
    return (maxima.float() * _BITSANDBYTES_127TH).unsqueeze(1)


def bitsandbytes_4bit(packed: Tensor, values: Tensor, maxima: Tensor, block: int) -> Tensor:
    """NF4 and FP4: numbers of a table, times the maximum of their block.

    Args:
        packed: uint8 [n]; of the two codes in a byte the first stands in its high half.
        values: float32 [16], by code.
        maxima: float32 [blocks].
        block: numbers that share a maximum; the last block may be cut short.

    Returns float32 [2n].
    """
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
    return values.float()[codes.int()] * maxima.repeat_interleave(block)[: len(codes)]


def bitsandbytes_maxima(
    codes: Tensor, values: Tensor, maxima: Tensor, offset: float, block: int
) -> Tensor:
    """Maxima that are themselves quantised ("nested").

    Args:
        codes: uint8 [n].
        values: float32 [256], by code.
        maxima: float32 [blocks], of the codes.
        offset: added at the end.
        block: codes that share a maximum.
    """
    return values.float()[codes.int()] * maxima.repeat_interleave(block)[: len(codes)] + offset


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """OCP's microscaling format: floats of 4 bits (e2m1), of which 32 share an exponent.

    Args:
        blocks: uint8 [..., groups, 16]; of the two numbers in a byte the first stands in its low
            half.
        scales: uint8 [..., groups]: e8m0.

    Returns float32 [..., groups * 32].
    """
    return (float4(blocks) * float8_exponents(scales).unsqueeze(-1)).flatten(-2)


def float4(packed: Tensor) -> Tensor:
    """e2m1 numbers, two a byte, the first in its low half: uint8 [..., n] -> float32 [..., 2n]."""
    return _FLOAT4_PAIRS.to(packed.device)[packed.int()].flatten(-2)


def float8_exponents(scales: Tensor) -> Tensor:
    """e8m0 numbers: uint8 e is 2^(e - 127), and 255 is NaN; float32 of the same shape."""
    return scales.view(torch.float8_e8m0fnu).float()
