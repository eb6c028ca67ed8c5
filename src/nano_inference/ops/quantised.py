"""Weights in 8 to 4 bits: the arithmetic that every backend implements. `ops.formats` defines the
formats.

A weight is integers (codes) times scales. A product rounds its input to codes of 8 bits, row by
row, adds up products of codes as integers, and multiplies by both scales:

    y[n] = sum over groups g, in rising order, of
           (x codes of g . w codes of g) * (x scale * w scale)
           - (sum of x codes of g) * (x scale * w min)

The last term applies to formats with a minimum, whose weights are code * scale - min.

In a format with steps, scales and minima are whole numbers of a step that 256 columns share. The
input then has one scale for these columns, and a step's products are added as integers:

    y[n] = sum over steps t, in rising order, of
           (sum over groups g of t of (x codes of g . w codes of g) * scale) * (x scale * step)
           - (sum over groups g of t of (sum of x codes of g) * min) * (x scale * min step)

Weights in FP8 are numbers of e4m3 times one scale a row. Their inputs are not rounded to codes: a
product adds up x * e4m3 in float32 and multiplies the sum by the scale. Backends choose the order
of additions, as for plain weights.

Sums of integers are the same in any order. A format with one group per segment (`"int8"`) therefore
has the same bits however a product is cut. The other formats add up a few floats in a fixed order.
Segments are merged like those of `Ops.linear`.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from nano_inference.arrays import Tensor, namespace, with_columns
from nano_inference.ops.formats import STEP, Format, groups_of, input_groups_of, widest
from nano_inference.parallel.segments import tree_sum

MOST = 127  # largest code of 8 bits, also of every input
TINY = 1e-30  # groups whose largest magnitude is at most this count as zeros


@np.errstate(all="ignore")
def scaled_rows(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scale float32 rows [N, K] so that the largest magnitude of each becomes `most`. Return them,
    not rounded, and float32 scales [N, 1]. A row with a non-finite number becomes zeros with the
    scale NaN.
    """
    xp = namespace(x)
    largest = x.abs().amax(dim=1, keepdim=True)
    known = (x * 0).sum(dim=1, keepdim=True)  # NaN if a number is not finite
    tiny = ~(largest > TINY)
    # an array: torch may divide by a Python number differently
    whole = xp.full_like(largest, most)
    inverse = xp.where(tiny, 0.0, whole / largest)
    numbers = xp.where(known == 0, x * inverse, 0.0)
    return numbers, xp.where(tiny, 0.0, largest / whole) + known


def quantise_rows(x: Tensor, groups: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Quantize inputs [N, K] to codes float32 [N, K] and scales float32 [N, groups]. A group with a
    non-finite number gets the scale NaN and codes of 0.
    """
    xp, x = namespace(x), x.float()
    codes, scales = xp.zeros_like(x), x.new_zeros((len(x), len(groups)))
    for g, (first, last) in enumerate(groups):
        if first == last:
            continue
        numbers, scales[:, g : g + 1] = scaled_rows(x[:, first:last], MOST)
        codes[:, first:last] = xp.round(numbers)
    return codes, scales


@np.errstate(all="ignore")
def quantise_weight(
    weight: Tensor, form: Format, groups: list[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a weight [rows, K] to codes int8 [rows, K] (`Format.range`), scales float32
    [rows, groups], and their steps if the format has steps. Scales are rounded as the format stores
    them. Non-finite numbers make a scale NaN, or all scales with the same step.
    """
    low, high = form.range
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
        if form.scales == "exponents":  # those of OCP's microscaling
            scale = _power_below(largest) / (1 << high.bit_length() - 1)
        else:
            scale = largest / xp.full_like(largest, low)
        if form.bits == 8:
            scale = scale.abs()
        scales[:, g : g + 1] = xp.where(largest.abs() > TINY, scale, 0.0) + known
    steps = None
    if form.scales == "half":
        scales = scales.to(xp.float16).float()
    if form.scales == "steps":
        scales, steps = _in_steps(scales, form)
    for g, (first, last) in enumerate(groups):
        scale = scales[:, g : g + 1]
        inverse = xp.where(scale == 0, 0.0, 1 / scale)
        numbers = xp.where(scale * 0 == 0, weight[:, first:last] * inverse, 0.0)
        if form.floats:
            codes[:, first:last] = numbers.clamp(low, high).to(xp.float8_e4m3fn).view(xp.int8)
            continue
        whole = _nearest(numbers, form) if form.values else xp.round(numbers).clamp(low, high)
        codes[:, first:last] = whole.to(xp.int8)
    return codes, scales, steps


def _power_below(numbers: Tensor) -> Tensor:
    """Return the largest powers of two up to the magnitudes of float32 numbers."""
    xp = namespace(numbers)
    return (numbers.contiguous().view(xp.int32) & 0x7F800000).view(xp.float32)


def _nearest(numbers: Tensor, form: Format) -> Tensor:
    """Round to the nearest values of a format, the lower one of two."""
    xp = namespace(numbers)
    middles = xp.tensor([(a + b) / 2 for a, b in pairwise(form.values)], device=numbers.device)
    values = xp.tensor(form.values, device=numbers.device)
    return values.float()[xp.searchsorted(middles.float(), numbers.contiguous())]


def _in_steps(scales: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Round scales [rows, groups] away from 0 to whole steps, at most 127. Return them and the
    steps [rows, steps], both in float32.
    """
    xp, width = namespace(scales), form.groups_per_step
    steps = scales.new_zeros((len(scales), -(-scales.shape[1] // width)))
    rounded = xp.zeros_like(scales)
    for at in range(steps.shape[1]):
        part = scales[:, at * width : (at + 1) * width]
        largest = part.abs().amax(dim=1, keepdim=True) + (part * 0).sum(dim=1, keepdim=True)
        step = (largest / xp.full_like(largest, MOST)).to(xp.float16).float()
        size = part.abs() * xp.where(step == 0, 0.0, 1 / step)
        size = (-xp.floor(-size)).clamp(0, MOST)
        whole = xp.where(part < 0, -size, size)
        rounded[:, at * width : (at + 1) * width] = xp.where(step * 0 == 0, whole, 0.0) * step
        steps[:, at : at + 1] = step
    return rounded, steps


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized weight as plain arrays.

    Attributes:
        codes: int8 [rows, K], -8 to 7 for formats of 4 bits without a minimum, the values of the
            format, or the bits of e4m3 numbers.
        scales: float32 [rows, groups].
        form: Format of the weight.
        bounds: Bounds of its segments.
        mins: float32 [rows, groups] if the format has minima.
        steps: float32 [rows, steps] if the format has steps. Scales are multiples of them.
        min_steps: The same for minima.
    """

    codes: Tensor
    scales: Tensor
    form: Format
    bounds: tuple[int, ...]
    mins: Tensor | None = None
    steps: Tensor | None = None
    min_steps: Tensor | None = None

    @property
    def groups(self) -> list[tuple[int, int]]:
        """First and last column of each scale's group."""
        return groups_of(self.bounds, self.form)

    def rows(self, start: int, stop: int) -> "Codes":
        """Return the rows [start, stop)."""
        return self.sliced(slice(start, stop))

    def sliced(self, rows: slice) -> "Codes":
        """Return some rows."""
        parts = [
            None if part is None else part[rows].contiguous()
            for part in (self.codes, self.scales, self.mins, self.steps, self.min_steps)
        ]
        codes, scales, mins, steps, min_steps = parts
        assert codes is not None
        assert scales is not None
        return Codes(codes, scales, self.form, self.bounds, mins, steps, min_steps)

    def columns(self, start: int, stop: int) -> "Codes":
        """Return the columns [start, stop), which must be whole groups or a part of the only
        one. Without whole steps, the result has float32 scales.
        """
        groups = slice(0, 1)
        if self.form.group:
            groups = slice(start // self.form.group, -(-stop // self.form.group))
        mins = None if self.mins is None else self.mins[:, groups]
        codes, scales = self.codes[:, start:stop], self.scales[:, groups]
        part = replace(self, codes=codes, scales=scales, bounds=(0, stop - start), mins=mins)
        if self.steps is None:
            return part
        if start % STEP:
            return widened(part, widest([self.form], columns=1), part.bounds)
        steps = slice(start // STEP, -(-stop // STEP))
        min_steps = None if self.min_steps is None else self.min_steps[:, steps]
        return replace(part, steps=self.steps[:, steps], min_steps=min_steps)

    def values(self) -> Tensor:
        """Return the numbers that the scales multiply, float32 [rows, K]."""
        if not self.form.floats:
            return self.codes.float()
        return self.codes.contiguous().view(namespace(self.codes).float8_e4m3fn).float()

    def numbers(self) -> Tensor:
        """Decode the weights, float32 [rows, K]."""
        xp, widths = namespace(self.scales), [last - first for first, last in self.groups]
        widths = xp.tensor(widths, device=self.scales.device)
        numbers = self.values() * self.scales.repeat_interleave(widths, dim=1)
        if self.mins is None:
            return numbers
        return numbers - self.mins.repeat_interleave(widths, dim=1)


def unpacked(data: Tensor, columns: int, form: Format) -> Tensor:
    """Unpack codes int8 [n, columns] from rows of bytes that begin with them. Codes of 4 bits are
    stored two per byte, the first in the lower half, others one per byte.
    """
    xp = namespace(data)
    if form.bits != 4:
        return data[:, :columns].view(xp.int8)
    pairs = data[:, : -(-columns // 2)]
    codes = xp.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, :columns]
    if form.values:
        return xp.tensor(form.values, dtype=xp.int8, device=data.device)[codes.int()]
    return codes.view(xp.int8) - (0 if form.mins else form.middle)


def packed(codes: Tensor, form: Format) -> Tensor:
    """Pack codes int8 [n, K] to bytes uint8 [n, K or half of it] that `unpacked` reads."""
    xp = namespace(codes)
    if form.bits != 4:
        return codes.view(xp.uint8)
    moved = codes if form.mins else codes + form.middle
    if form.values:
        values = xp.tensor(form.values, dtype=xp.float32, device=codes.device)
        moved = xp.searchsorted(values, codes.float()).to(xp.int8)
    pairs = with_columns(moved, -(-codes.shape[1] // 2) * 2).view(xp.uint8)
    return pairs[:, ::2] | pairs[:, 1::2] << 4


@np.errstate(all="ignore")
def encode(weight: Tensor, form: Format, bounds: tuple[int, ...]) -> Codes:
    """Encode a weight [rows, K] in a format. Formats with a minimum are meant for codes from files.
    The minimum set here only centers the codes: 8 * scale for 4 bits, 0 for 8 bits.
    """
    codes, scales, steps = quantise_weight(weight, form, groups_of(bounds, form))
    if not form.mins:
        return Codes(codes, scales, form, bounds, steps=steps)
    xp, min_steps = namespace(scales), None
    mins = scales * form.middle
    if form.scales == "half":
        mins = mins.to(xp.float16).float()
    if steps is not None:
        min_steps = (steps * form.middle).to(xp.float16).float()
        mins = _whole(scales, steps, form) * _spread(min_steps, scales.shape[1], form)
    return Codes(codes + form.middle, scales, form, bounds, mins, steps, min_steps)


def _spread(steps: Tensor, groups: int, form: Format) -> Tensor:
    """Return the step of each group, [rows, groups]."""
    return steps[:, namespace(steps).arange(groups) // form.groups_per_step]


def _whole(scales: Tensor, steps: Tensor, form: Format) -> Tensor:
    """Return scales as numbers of steps, -128 to 127."""
    xp, each = namespace(scales), _spread(steps, scales.shape[1], form)
    return xp.where(each * 0 == 0, xp.where(each == 0, 0.0, xp.round(scales / each)), 0.0)


def product(x: Tensor, weight: Codes) -> Tensor:
    """Multiply x [N, K] by a weight [rows, K], in float32 [N, rows], with the bits of every
    backend.
    """
    groups = input_groups_of(weight.bounds, weight.form)
    codes, scales = quantise_rows(x, groups)
    parts = _parts_in_steps if weight.form.scales == "steps" else _parts
    sums: list[Tensor] = []
    for start, end in pairwise(weight.bounds):
        total = x.new_zeros((len(x), len(weight.codes)), dtype=namespace(x).float32)
        for g, (first, last) in enumerate(groups):
            if first < start or last > end or first == last:
                continue
            whole, scale, least, least_scale = parts(codes[:, first:last], weight, g, first, last)
            own = scales[:, g, None]
            total = total + whole.float() * (own * scale)
            if least_scale is not None:
                total = total - least.float() * (own * least_scale)
        sums.append(total)
    return tree_sum(sums)


def _parts(
    codes: Tensor, weight: Codes, g: int, first: int, last: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Multiply the codes of a group. Return the integers [N, rows] and [N, 1] of the product and of
    the minimum in float64, which holds them exactly, with the scales [1, rows] of both.
    """
    codes = codes.double()
    whole = codes @ weight.codes[:, first:last].double().T
    mins = None if weight.mins is None else weight.mins[None, :, g]
    return whole, weight.scales[None, :, g], codes.sum(dim=1, keepdim=True), mins


def _parts_in_steps(
    codes: Tensor, weight: Codes, t: int, first: int, last: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Multiply the codes of a step. Return the same as `_parts`."""
    form, codes = weight.form, codes.double()
    assert weight.steps is not None
    numbers = _whole(weight.scales, weight.steps, form)
    whole = least = codes[:, :1] * 0
    mins = None
    if weight.mins is not None and weight.min_steps is not None:
        mins = _whole(weight.mins, weight.min_steps, form)
    for at in range(first, last, form.group):
        g, part = at // form.group, slice(at - first, at - first + form.group)
        products = codes[:, part] @ weight.codes[:, at : min(at + form.group, last)].double().T
        whole = whole + products * numbers[None, :, g].double()
        if mins is not None:
            least = least + codes[:, part].sum(dim=1, keepdim=True) * mins[None, :, g].double()
    min_step = None if weight.min_steps is None else weight.min_steps[None, :, t]
    return whole, weight.steps[None, :, t], least, min_step


def widened(weight: Codes, form: Format, bounds: tuple[int, ...]) -> Codes:
    """Return the same weights in a format that holds them (`Format.holds`), in segments with these
    bounds. Each new group must lie within one of the old groups.
    """
    if (weight.form, weight.bounds) == (form, bounds):
        return weight
    if weight.form == form and form.group:
        return replace(weight, bounds=bounds)
    starts = [first for first, _ in weight.groups]
    at = [bisect_right(starts, first) - 1 for first, _ in groups_of(bounds, form)]
    codes, scales = weight.codes, weight.scales[:, at]
    mins = None if weight.mins is None else weight.mins[:, at]
    if form.mins and mins is None:
        codes, mins = codes + form.middle, scales * form.middle
    return Codes(codes, scales, form, bounds, mins)
