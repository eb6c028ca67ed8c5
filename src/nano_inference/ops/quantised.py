"""Weights in 8 and 4 bits: the arithmetic that every backend implements. `ops.formats` defines the
formats.

A weight is integers (codes) times scales. A product rounds its input to codes of 8 bits, row by
row, adds up products of codes as integers, and multiplies by both scales:

    y[n] = sum over groups g, in rising order, of
           (x codes of g . w codes of g) * (x scale * w scale)
           - (sum of x codes of g) * (x scale * w min)

The last term applies to formats with a minimum, whose weights are code * scale - min.

Sums of integers are the same in any order. A format with one group per segment (`"int8"`) therefore
has the same bits however a product is cut. The other formats add up a few floats in a fixed order.
Segments are merged like those of `Ops.linear`.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from nano_inference.arrays import Tensor, namespace, with_columns
from nano_inference.ops.formats import Format, groups_of
from nano_inference.parallel.segments import tree_sum

MOST = 127  # largest code of 8 bits, also of every input
TINY = 1e-30  # groups whose largest magnitude is at most this count as zeros


@np.errstate(all="ignore")
def quantise_rows(x: Tensor, groups: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Quantize inputs [N, K] to codes float32 [N, K] and scales float32 [N, groups]. A group with a
    non-finite number gets the scale NaN and codes of 0.
    """
    xp, x = namespace(x), x.float()
    codes, scales = xp.zeros_like(x), x.new_zeros((len(x), len(groups)))
    for g, (first, last) in enumerate(groups):
        if first == last:
            continue
        part = x[:, first:last]
        largest = part.abs().amax(dim=1, keepdim=True)
        known = (part * 0).sum(dim=1, keepdim=True)  # NaN if a number is not finite
        tiny = ~(largest > TINY)
        # an array: torch may divide by a Python number differently
        most = xp.full_like(largest, MOST)
        inverse = xp.where(tiny, 0.0, most / largest)
        whole = xp.round(part * inverse)
        codes[:, first:last] = xp.where(known == 0, whole, 0.0)
        scales[:, g : g + 1] = xp.where(tiny, 0.0, largest / most) + known
    return codes, scales


@np.errstate(all="ignore")
def quantise_weight(
    weight: Tensor, form: Format, groups: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Quantize a weight [rows, K] to codes int8 [rows, K] (of 4 bits: -8 to 7) and scales float32
    [rows, groups]. Scales are rounded to float16 if the format stores them so. Non-finite numbers
    make a scale NaN.
    """
    xp, weight = namespace(weight), weight.float()
    codes = xp.zeros(weight.shape, dtype=xp.int8, device=weight.device)
    scales = weight.new_zeros((len(weight), len(groups)))
    for g, (first, last) in enumerate(groups):
        if first == last:
            continue
        part = weight[:, first:last]
        known = (part * 0).sum(dim=1, keepdim=True)
        index = part.abs().argmax(dim=1, keepdim=True)  # the first of several equal ones
        largest = part.gather(1, index)
        if form.bits == 8:
            scale, low, high = largest.abs() / xp.full_like(largest, MOST), -MOST, MOST
        else:
            scale, low, high = largest / -form.middle, -form.middle, form.middle - 1
        scale = xp.where(largest.abs() > TINY, scale, 0.0) + known
        if not form.wide:
            scale = scale.to(xp.float16).float()
        inverse = xp.where(scale == 0, 0.0, 1 / scale)
        whole = xp.round(part * inverse).clamp(low, high)
        codes[:, first:last] = xp.where(known == 0, whole, 0.0).to(xp.int8)
        scales[:, g : g + 1] = scale
    return codes, scales


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized weight as plain arrays.

    Attributes:
        codes: int8 [rows, K], -8 to 7 for formats of 4 bits without a minimum.
        scales: float32 [rows, groups].
        form: Format of the weight.
        bounds: Bounds of its segments.
        mins: float32 [rows, groups] if the format has minima.
    """

    codes: Tensor
    scales: Tensor
    form: Format
    bounds: tuple[int, ...]
    mins: Tensor | None = None

    @property
    def groups(self) -> list[tuple[int, int]]:
        """First and last column of each scale's group."""
        return groups_of(self.bounds, self.form)

    def rows(self, start: int, stop: int) -> "Codes":
        """Return the rows [start, stop)."""
        mins = None if self.mins is None else self.mins[start:stop]
        codes, scales = self.codes[start:stop], self.scales[start:stop]
        return replace(self, codes=codes, scales=scales, mins=mins)

    def columns(self, start: int, stop: int) -> "Codes":
        """Return the columns [start, stop), which must be whole groups or a part of the only
        one.
        """
        groups = slice(0, 1)
        if self.form.group:
            groups = slice(start // self.form.group, -(-stop // self.form.group))
        mins = None if self.mins is None else self.mins[:, groups]
        codes, scales = self.codes[:, start:stop], self.scales[:, groups]
        return replace(self, codes=codes, scales=scales, bounds=(0, stop - start), mins=mins)

    def numbers(self) -> Tensor:
        """Decode the weights, float32 [rows, K]."""
        xp, widths = namespace(self.scales), [last - first for first, last in self.groups]
        widths = xp.tensor(widths, device=self.scales.device)
        numbers = self.codes.float() * self.scales.repeat_interleave(widths, dim=1)
        if self.mins is None:
            return numbers
        return numbers - self.mins.repeat_interleave(widths, dim=1)


def unpacked(data: Tensor, columns: int, form: Format) -> Tensor:
    """Unpack codes int8 [n, columns] from rows of bytes that begin with them. Codes of 4 bits are
    stored two per byte, the first in the lower half.
    """
    xp = namespace(data)
    if form.bits == 8:
        return data[:, :columns].view(xp.int8)
    pairs = data[:, : -(-columns // 2)]
    codes = xp.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, :columns]
    return codes.view(xp.int8) - (0 if form.mins else form.middle)


def packed(codes: Tensor, form: Format) -> Tensor:
    """Pack codes int8 [n, K] to bytes uint8 [n, K or half of it] that `unpacked` reads."""
    xp = namespace(codes)
    if form.bits == 8:
        return codes.view(xp.uint8)
    moved = codes if form.mins else codes + form.middle
    pairs = with_columns(moved, -(-codes.shape[1] // 2) * 2).view(xp.uint8)
    return pairs[:, ::2] | pairs[:, 1::2] << 4


def encode(weight: Tensor, form: Format, bounds: tuple[int, ...]) -> Codes:
    """Encode a weight [rows, K] in a format. Formats with a minimum are meant for codes from files.
    The minimum set here only centers the codes: 8 * scale for 4 bits, 0 for 8 bits.
    """
    codes, scales = quantise_weight(weight, form, groups_of(bounds, form))
    if not form.mins:
        return Codes(codes, scales, form, bounds)
    return Codes(codes + form.middle, scales, form, bounds, scales * form.middle)


def product(x: Tensor, weight: Codes) -> Tensor:
    """Multiply x [N, K] by a weight [rows, K], in float32 [N, rows], with the bits of every
    backend.
    """
    groups = weight.groups
    codes, scales = quantise_rows(x, groups)
    sums: list[Tensor] = []
    for start, end in pairwise(weight.bounds):
        total = x.new_zeros((len(x), len(weight.codes)), dtype=namespace(x).float32)
        for g, (first, last) in enumerate(groups):
            if first < start or last > end or first == last:
                continue
            # integers below 2^53 are exact in float64, in any order
            whole = codes[:, first:last].double() @ weight.codes[:, first:last].double().T
            scale = scales[:, g, None] * weight.scales[None, :, g]
            total = total + whole.float() * scale
            if weight.mins is not None:
                least = scales[:, g, None] * weight.mins[None, :, g]
                total = total - codes[:, first:last].sum(dim=1, keepdim=True) * least
        sums.append(total)
    return tree_sum(sums)


def widened(weight: Codes, form: Format, bounds: tuple[int, ...]) -> Codes:
    """Return the same weights in a format that holds them (`Format.holds`), in segments with these
    bounds. Each new group must lie within one of the old groups.
    """
    if (weight.form, weight.bounds) == (form, bounds):
        return weight
    starts = [first for first, _ in weight.groups]
    at = [bisect_right(starts, first) - 1 for first, _ in groups_of(bounds, form)]
    codes, scales = weight.codes, weight.scales[:, at]
    mins = None if weight.mins is None else weight.mins[:, at]
    if form.mins and mins is None:
        codes, mins = codes + form.middle, scales * form.middle
    return Codes(codes, scales, form, bounds, mins)
