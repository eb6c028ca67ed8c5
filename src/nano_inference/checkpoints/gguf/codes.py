"""Codes, scales and minima of GGUF blocks, without expansion to numbers.

A weight is code * scale - minimum in float32, equal to the number that the `gguf` package returns.
Sources: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nano_inference.ops.formats import FORMATS

Bytes = np.ndarray  # uint8 [rows, blocks, bytes of a block]


class Blocks(NamedTuple):
    """Contents of some rows of blocks."""

    codes: np.ndarray  # int8 [rows, columns]; 4-bit codes are -8 to 7, or 0 to 15 with minima,
    # or the numbers of a table
    scales: np.ndarray  # float16 or float32 [rows, groups]
    mins: np.ndarray | None = None  # float32 [rows, groups]
    steps: np.ndarray | None = None  # float32 [rows, blocks]: scales are multiples of them
    min_steps: np.ndarray | None = None  # the same for minima


class Kind(NamedTuple):
    """GGUF type that is read as codes.

    Attributes:
        form: Name of the format in `ops.quantised` that holds it.
        columns: Columns per block.
        read: Function that reads its blocks.
    """

    form: str
    columns: int
    read: Callable[[Bytes], Blocks]


def _halves(blocks: Bytes, start: int) -> np.ndarray:
    """Return one float16 of each block."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(qs: Bytes) -> np.ndarray:
    """Return the lower halves of the bytes, then the upper halves."""
    return np.concatenate((qs & 15, qs >> 4), axis=-1)


def _rows(codes: np.ndarray) -> np.ndarray:
    """Return codes as int8 [rows, columns]."""
    return codes.reshape(len(codes), -1).astype(np.int8)


def _q8_0(blocks: Bytes) -> Blocks:
    return Blocks(_rows(blocks[..., 2:].view(np.int8)), _halves(blocks, 0))


def _q4_0(blocks: Bytes) -> Blocks:
    return Blocks(_rows(_nibbles(blocks[..., 2:]).astype(np.int8) - 8), _halves(blocks, 0))


def _q4_1(blocks: Bytes) -> Blocks:
    scales, least = (_halves(blocks, at).astype(np.float32) for at in (0, 2))
    return Blocks(_rows(_nibbles(blocks[..., 4:])), scales, -least)


def _fifth_bits(bits: Bytes) -> np.ndarray:
    """Return the fifth bits of 32 codes, shifted into place."""
    return np.unpackbits(bits, axis=-1, bitorder="little") << 4


def _q5_0(blocks: Bytes) -> Blocks:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Blocks(_rows(codes.astype(np.int8) - 16), _halves(blocks, 0))


def _q5_1(blocks: Bytes) -> Blocks:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    scales, least = (_halves(blocks, at).astype(np.float32) for at in (0, 2))
    return Blocks(_rows(codes), scales, -least)


def _scales_and_mins(blocks: Bytes) -> tuple[np.ndarray, ...]:
    """Return the scales and minima of a block's eight groups, and their steps.

    Each is a 6-bit integer times a float16 of the block.
    """
    d, dmin = (_halves(blocks, at).astype(np.float32)[..., None] for at in (0, 2))
    first, second, high = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, (high & 15) | (first >> 2 & 48)), axis=-1)
    mins = np.concatenate((second & 63, (high >> 4) | (second >> 2 & 48)), axis=-1)
    first, second = d * scales.astype(np.float32), dmin * mins.astype(np.float32)
    return tuple(each.reshape(len(blocks), -1) for each in (first, second, d, dmin))


def _q4_k(blocks: Bytes) -> Blocks:
    qs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)  # 32 bytes hold two groups
    return Blocks(_rows(_nibbles(qs)), *_scales_and_mins(blocks))


def _q5_k(blocks: Bytes) -> Blocks:
    qs = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    groups = _nibbles(qs).reshape(*blocks.shape[:2], 8, 32)
    high = blocks[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Blocks(_rows(groups | high << 4), *_scales_and_mins(blocks))


def _q6_k(blocks: Bytes) -> Blocks:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = low.reshape(*high.shape) | high << 4
    steps = _halves(blocks, 208).astype(np.float32)
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * steps[..., None]
    return Blocks(_rows(codes.astype(np.int8) - 32), scales.reshape(len(blocks), -1), steps=steps)


# Numbers of 4-bit codes. MXFP4 has two zeros, and the numbers are doubled.
_IQ4 = np.array(FORMATS["iq4-32"].values, np.int8)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _iq4_nl(blocks: Bytes) -> Blocks:
    return Blocks(_rows(_IQ4[_nibbles(blocks[..., 2:])]), _halves(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Blocks:
    codes = _nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))
    group = np.arange(8, dtype=np.uint8)
    low = blocks[..., 4:8].repeat(2, axis=-1) >> group % 2 * 4 & 15
    high = blocks[..., 2:4].repeat(4, axis=-1) >> group % 4 * 2 & 3
    steps = _halves(blocks, 0).astype(np.float32)
    scales = ((low | high << 4).astype(np.float32) - 32) * steps[..., None]
    return Blocks(_rows(_IQ4[codes]), scales.reshape(len(blocks), -1), steps=steps)


def _mxfp4(blocks: Bytes) -> Blocks:
    powers = blocks[..., 0].astype(np.int32)
    scales = np.ldexp(np.float32(1), powers - 128)  # half of 2^(power - 127)
    scales = np.where(powers == 255, np.float32(np.nan), scales)
    return Blocks(_rows(_FP4[_nibbles(blocks[..., 1:])]), scales)


KINDS = {
    "Q8_0": Kind("int8-32", 32, _q8_0),
    "Q4_0": Kind("int4-32", 32, _q4_0),
    "Q4_1": Kind("int4-32-min-half", 32, _q4_1),
    "Q5_0": Kind("int5-32", 32, _q5_0),
    "Q5_1": Kind("int5-32-min-half", 32, _q5_1),
    "Q4_K": Kind("int4-32-steps", 256, _q4_k),
    "Q5_K": Kind("int5-32-steps", 256, _q5_k),
    "Q6_K": Kind("int6-16-steps", 256, _q6_k),
    "IQ4_NL": Kind("iq4-32", 32, _iq4_nl),
    "IQ4_XS": Kind("iq4-32-steps", 256, _iq4_xs),
    "MXFP4": Kind("mxfp4-32", 32, _mxfp4),
}


def read_blocks(kind: str, rows: np.ndarray, columns: int) -> Blocks:
    """Read stored rows, uint8 [rows, bytes], of a type in `KINDS`."""
    layout = KINDS[kind]
    return layout.read(np.ascontiguousarray(rows).reshape(len(rows), columns // layout.columns, -1))


def numbers_of(kind: str, rows: np.ndarray, columns: int) -> np.ndarray:
    """Return stored rows, uint8 [rows, bytes], of any type as float32 [rows, columns]."""
    if kind in _FLOATS:
        return _FLOATS[kind](np.ascontiguousarray(rows))
    if kind not in KINDS:
        from gguf import GGMLQuantizationType, dequantize  # slow to import

        return dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[kind])
    codes, scales, mins, *_ = read_blocks(kind, rows, columns)
    numbers = codes.astype(np.float32)
    groups = numbers.reshape(*scales.shape, -1)  # a view
    with np.errstate(invalid="ignore", over="ignore"):  # scales of a damaged file may be infinite
        groups *= scales[..., None].astype(np.float32)
        if mins is not None:
            groups -= mins[..., None]
    return numbers


_FLOATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda rows: rows.view(np.float32),
    "F16": lambda rows: rows.view(np.float16).astype(np.float32),
    "BF16": lambda rows: (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
}
