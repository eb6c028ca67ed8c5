"""Weights in 8 and 4 bits: the formats, and what every backend computes with them.

A weight is whole numbers (codes) times scales. A product rounds its input to codes of 8 bits, row
by row, adds up products of codes as whole numbers, and multiplies by both scales:

    y[n] = sum over groups g, in rising order, of (x codes of g . w codes of g) * (w scale * x scale)

Sums of whole numbers are the same in any order, so a format that has one group a segment
(`"int8"`) has the same bits however a product is cut; the others add up few floats in a fixed
order. Segments are merged as those of `Ops.linear` are.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nano_inference.parallel.segments import tree_sum

MOST = 127  # of a code of 8 bits, also of every input
TINY = 1e-30  # a group whose largest number is no larger counts as zeros
GROUP = 32


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is stored.

    Attributes:
        name: of it.
        bits: of a code, 8 or 4. Codes of 8 bits are -127 to 127, those of 4 bits 0 to 15 and stand
            for -8 to 7.
        group: columns that have a scale in common, in float16; 0: a segment, in float32.
    """

    name: str
    bits: int
    group: int

    @property
    def bytes_per_weight(self) -> float:
        """What a weight takes, its part of a scale included, of long rows."""
        return self.bits / 8 + (2 / self.group if self.group else 0)


FORMATS = {
    each.name: each
    for each in (Format("int8", 8, 0), Format("int8-32", 8, GROUP), Format("int4-32", 4, GROUP))
}
# `EngineConfig.quantization`: the format of a model's layers, and that of its head, by which logits
# are made.
QUANTIZATIONS = {
    "int8": (FORMATS["int8"], FORMATS["int8"]),
    "int8-32": (FORMATS["int8-32"], FORMATS["int8-32"]),
    "int4": (FORMATS["int4-32"], FORMATS["int8-32"]),
}


def bounds_of(segments: tuple[int, ...] | None, columns: int, form: Format) -> tuple[int, ...]:
    """Where the segments of a quantised weight begin, and its columns: one segment where those
    asked for do not begin with a whole group, or with a fourth column.
    """
    unit = form.group or 4
    if segments is None or any(bound % unit for bound in segments[:-1]):
        return (0, columns)
    return segments


def groups_of(bounds: tuple[int, ...], form: Format) -> list[tuple[int, int]]:
    """First and last column of each group, segment by segment."""
    if not form.group:
        return list(pairwise(bounds))
    return [
        (first, min(first + form.group, bounds[-1]))
        for first in range(0, bounds[-1], form.group)
    ]


def quantise_rows(x: Tensor, groups: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Inputs [N, K] as codes float32 [N, K] and scales float32 [N, groups]. A group that holds
    what is not finite has a scale that is NaN, and codes of 0.
    """
    x = x.float()
    codes, scales = torch.zeros_like(x), x.new_zeros((len(x), len(groups)))
    for g, (first, last) in enumerate(groups):
        if first == last:
            continue
        part = x[:, first:last]
        largest = part.abs().amax(dim=1, keepdim=True)
        known = (part * 0).sum(dim=1, keepdim=True)  # NaN where something is not finite
        tiny = ~(largest > TINY)
        most = torch.full_like(largest, MOST)  # by a number torch may divide otherwise
        inverse = torch.where(tiny, 0.0, most / largest)
        whole = torch.round(part * inverse)
        codes[:, first:last] = torch.where(known == 0, whole, 0.0)
        scales[:, g : g + 1] = torch.where(tiny, 0.0, largest / most) + known
    return codes, scales


def quantise_weight(
    weight: Tensor, form: Format, groups: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """A weight [rows, K] as codes int8 [rows, K] (of 4 bits: -8 to 7) and scales float32
    [rows, groups], rounded to float16 where the format has them so. What is not finite makes a
    scale that is NaN.
    """
    weight = weight.float()
    codes = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
    scales = weight.new_zeros((len(weight), len(groups)))
    for g, (first, last) in enumerate(groups):
        if first == last:
            continue
        part = weight[:, first:last]
        known = (part * 0).sum(dim=1, keepdim=True)
        place = part.abs().argmax(dim=1, keepdim=True)  # of equal ones the first
        largest = part.gather(1, place)
        if form.bits == 8:
            scale, low, high = largest.abs() / torch.full_like(largest, MOST), -MOST, MOST
        else:
            scale, low, high = largest / -8, -8, 7
        scale = torch.where(largest.abs() > TINY, scale, 0.0) + known
        if form.group:
            scale = scale.half().float()
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        whole = torch.round(part * inverse).clamp(low, high)
        codes[:, first:last] = torch.where(known == 0, whole, 0.0).to(torch.int8)
        scales[:, g : g + 1] = scale
    return codes, scales


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised weight as plain tensors.

    Attributes:
        codes: int8 [rows, K].
        scales: float32 [rows, groups].
        form: its format.
        bounds: of its segments.
    """

    codes: Tensor
    scales: Tensor
    form: Format
    bounds: tuple[int, ...]

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Columns of each scale."""
        return groups_of(self.bounds, self.form)

    def numbers(self) -> Tensor:
        """The weights that the codes stand for, float32 [rows, K]."""
        widths = torch.tensor([last - first for first, last in self.groups])
        spread = self.scales.repeat_interleave(widths.to(self.scales.device), dim=1)
        return self.codes.float() * spread


def product(x: Tensor, weight: Codes) -> Tensor:
    """X [N, K] times a weight [rows, K], in float32 [N, rows]: what every backend gives."""
    groups = weight.groups
    codes, scales = quantise_rows(x, groups)
    sums: list[Tensor] = []
    for start, end in pairwise(weight.bounds):
        total = x.new_zeros((len(x), len(weight.codes)), dtype=torch.float32)
        for g, (first, last) in enumerate(groups):
            if first < start or last > end or first == last:
                continue
            # whole numbers below 2^53: exact in float64, in any order
            whole = codes[:, first:last].double() @ weight.codes[:, first:last].double().T
            scale = scales[:, g, None] * weight.scales[None, :, g]
            total = total + whole.float() * scale
        sums.append(total)
    return tree_sum(sums)
