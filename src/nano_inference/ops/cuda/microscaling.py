"""Weights in MXFP4 on a GPU: 4-bit numbers (e2m1) with an exponent for 32 columns, and their
products, with the bits of `ops.quantised.product`.

Inputs are rounded to codes of 8 bits in groups of 32 columns. Tensor cores add up the products of a
group's codes in 32 bits, and both scales multiply the sum. The sums of groups are added in float32
in the order of the columns, whatever the tile.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.codes import INT8, encoded, is_finite, scale_and_inverse
from nano_inference.ops.cuda.quantised import AlignedWeight
from nano_inference.ops.cuda.rows import DTYPES, aligned
from nano_inference.ops.formats import FORMATS, GROUP
from nano_inference.ops.quantised import Codes, widened
from nano_inference.ops.reference.quantised import QuantisedWeight
from nano_inference.ops.stored_rows import require_rows

MXFP4 = FORMATS["mxfp4-32"]
PAIR = 2 * GROUP  # columns whose codes share bytes
_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice those of e2m1
_WIDTH, _PAIR = tl.constexpr(GROUP), tl.constexpr(PAIR)
# the same as hexadecimal digits of an int32, the first one last
_DIGITS = tl.constexpr(sum(size << 4 * bits for bits, size in enumerate(_MAGNITUDES)) - 2**32)


class MicroscaledWeight(AlignedWeight):
    """A weight in MXFP4, in 4.25 bits per number and up to 47 bytes per row.

    A row begins with 32 bytes for each 64 columns. The lower half of byte i is column i, the upper
    half is column 32 + i, so that either half is a group. Bits are those of e2m1: sign, exponent,
    mantissa. An exponent per group follows, of twice the numbers' unit.
    """

    def write_codes(self, start: int, weight: Codes) -> None:
        """Replace rows [start, start + n) by these codes, as `QuantisedWeight.write_codes`."""
        require_rows(self.shape, start, weight.codes)
        weight = widened(weight, self.form, self.bounds)
        target = self.data[start : start + len(weight.codes)]
        numbers = _padded(weight.codes.to(self.device), PAIR)
        magnitudes = torch.tensor(_MAGNITUDES, device=self.device)
        bits = torch.searchsorted(magnitudes, numbers.abs().long()) | (numbers < 0).long() << 3
        low, high = bits.to(torch.uint8).unflatten(1, (-1, 2, GROUP)).unbind(2)
        target[:, : self._codes_end] = (low | high << 4).flatten(1)
        exponents = _padded(_exponents(weight.scales.to(self.device)), self.alignment)
        target[:, self.scales_at :] = exponents

    def codes(self) -> Codes:
        """Return the weight as plain tensors."""
        pairs = self.data[:, : self._codes_end].unflatten(1, (-1, 1, GROUP))
        bits = torch.cat((pairs & 15, pairs >> 4), dim=2).flatten(1)[:, : self.columns].int()
        magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.int8, device=self.device)[bits & 7]
        groups = -(-self.columns // GROUP)
        exponents = self.data[:, self.scales_at :][:, :groups].int()
        scales = torch.where(exponents > 1, exponents - 1 << 23, 1 << 21 << exponents.clamp(max=1))
        scales = torch.where(exponents == 255, torch.nan, scales.view(torch.float32))
        numbers = torch.where(bits > 7, -magnitudes, magnitudes)
        return Codes(numbers, scales, self.form, self.bounds)

    @property
    def _codes_end(self) -> int:
        return -(-self.columns // PAIR) * GROUP

    @property
    def _ends(self) -> list[int]:
        groups = -(-self.columns // GROUP)
        return [self._codes_end, self._codes_end + self._aligned(groups)]


def _padded(rows: Tensor, unit: int) -> Tensor:
    """Append zeros to rows until their length is a multiple of `unit`."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % unit))


def _exponents(scales: Tensor) -> Tensor:
    """Return the bytes of scales, which are powers of two, 0 or NaN: 1 is 128. A group whose scale
    is 0 holds zeros, so any exponent fits.
    """
    bits = scales.contiguous().view(torch.int32)
    normal = (bits >> 23 & 255) + 1
    small = (bits >> 22 & 1).to(torch.int32)  # 2**-127 or 2**-128
    whole = torch.where(bits >> 23 & 255 > 0, normal, small)
    return torch.where(scales.isnan(), 255, whole).to(torch.uint8)


class GroupedRows(NamedTuple):
    """Rows rounded to codes in groups of 32 columns, with zeros after the last column."""

    codes: Tensor  # int8 [N, a multiple of 64]
    scales: Tensor  # float32 [N, a multiple of 2]


def grouped_rows(x: Tensor, weight: QuantisedWeight) -> GroupedRows:
    """Round rows [N, K] to the weight's dtype, then to codes."""
    rows, columns = x.shape
    groups = triton.cdiv(columns, PAIR) * 2
    codes = torch.empty((rows, groups * GROUP), dtype=torch.int8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(groups)
        _group_kernel[(rows,)](
            aligned(x), codes, scales, columns, groups, block, DTYPES[weight.dtype],
            num_warps=min(max(block // GROUP, 1), 16), enable_fp_fusion=False,
        )  # fmt: skip
    return GroupedRows(codes, scales)


@triton.jit
def _group_kernel(
    x, codes, scales, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Round a row to codes, group by group. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK)
    columns = groups[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
    part = tl.load(x + row * K + columns, mask=columns < K, other=0.0).to(DTYPE).to(tl.float32)
    finite = tl.min(is_finite(part), axis=1)
    scale, inverse = scale_and_inverse(tl.max(tl.abs(part), axis=1), finite, INT8)
    tl.store(scales + row * GROUPS + groups, scale, mask=groups < GROUPS)
    whole = encoded(part, inverse[:, None], finite[:, None], INT8)
    tl.store(codes + row * (GROUPS * _WIDTH) + columns, whole, mask=groups[:, None] < GROUPS)


@triton.jit
def microscaled_product(
    x_ptrs,  # int8 [ROWS, 32]: codes of rows, at the first column
    x_scale_ptrs,  # float32 [ROWS]: the first scale of each row
    row_mask,
    weight_ptrs,  # uint8 [32, COLUMNS]
    exponent_ptrs,  # uint8 [COLUMNS]
    column_mask,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return a tile of a product, float32 [ROWS, COLUMNS]."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for pair in range(PAIRS):
        both = tl.load(weight_ptrs + pair * _WIDTH, mask=column_mask[None, :], other=0)
        for half in tl.static_range(2):
            x = tl.load(x_ptrs + pair * _PAIR + half * _WIDTH, mask=row_mask[:, None], other=0)
            sums = tl.dot(x, _numbers(both >> 4 * half), out_dtype=tl.int32)
            group = 2 * pair + half
            x_scale = tl.load(x_scale_ptrs + group, mask=row_mask, other=0.0)
            exponent = tl.load(exponent_ptrs + group, mask=column_mask, other=0)
            total += sums.to(tl.float32) * (x_scale[:, None] * _power(exponent)[None, :])
    return total


@triton.jit
def _numbers(bits):
    """Return twice the e2m1 numbers in the lower halves of bytes, int8."""
    bits = bits.to(tl.int32)
    size = (_DIGITS >> ((bits & 7) * 4)) & 15
    return tl.where((bits & 8) != 0, -size, size).to(tl.int8)


@triton.jit
def _power(exponent):
    """Return the scales of exponents, float32: 2**(exponent - 128), or NaN for 255."""
    whole = exponent.to(tl.int32)
    bits = tl.where(whole > 1, (whole - 1) << 23, (1 << 21) << whole)
    scale = bits.to(tl.float32, bitcast=True)
    return tl.where(whole == 255, float("nan"), scale)
