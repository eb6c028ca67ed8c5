"""The formats of weights in 8 to 4 bits. `ops.quantised` defines their arithmetic. This module
must not import torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

GROUP = 32
STEP = 256  # columns that share a step
Scales = Literal["half", "float", "steps", "exponents"]
# Numbers of 4-bit codes: of IQ4_NL and IQ4_XS, and twice those of MXFP4 (e2m1)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True)
class Format:
    """Storage format of a weight.

    Attributes:
        name: Name of the format.
        bits: Bits per code: 8, 6, 5 or 4. Codes of 8 bits are -128 to 127. Others count from 0, and
            without a minimum the middle of their range represents 0.
        group: Number of columns that share a scale. 0: a whole segment.
        scales: Storage of scales: float16, float32, `"steps"`: an int8 times a float16 that 256
            columns share, as in K-quants of GGUF files, or `"exponents"`: powers of two.
        mins: If True, a group also has a minimum, stored like a scale.
        values: Numbers that the codes stand for, rising. Empty: the codes themselves.
        floats: If True, codes are the bits of e4m3 numbers, and products do not round their inputs
            to codes. A row has one scale.
    """

    name: str
    bits: int
    group: int
    scales: Scales = "half"
    mins: bool = False
    values: tuple[int, ...] = ()
    floats: bool = False

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight of long rows, including a share of the scale."""
        return self.bits / 8 + (self.group_bytes / self.group if self.group else 0)

    @property
    def group_bytes(self) -> float:
        """Bytes of a group's scale and minimum."""
        steps = 1 + 2 * self.group / STEP
        scale = {"half": 2, "float": 4, "steps": steps, "exponents": 1}[self.scales]
        return scale * (2 if self.mins else 1)

    @property
    def middle(self) -> int:
        """Code that represents 0 if codes have no sign and the format has no minimum."""
        return 0 if self.bits == 8 or self.values else 1 << (self.bits - 1)

    @property
    def range(self) -> tuple[int, int]:
        """Least and largest number to which weights are rounded."""
        if self.values:
            return self.values[0], self.values[-1]
        if self.floats:
            return -448, 448
        return (-127, 127) if self.bits == 8 else (-self.middle, self.middle - 1)

    @property
    def groups_per_step(self) -> int:
        """Number of groups that share a step."""
        return STEP // self.group

    @property
    def input_group(self) -> int:
        """Number of columns that share a scale of a product's input. 0: a whole segment."""
        return STEP if self.scales == "steps" else self.group

    def holds(self, other: "Format") -> bool:
        """Return True if this format stores weights of another format bit for bit. A format with
        group 0 only qualifies if a row has one segment.
        """
        is_moved = self.bits < 8 and self.mins and not other.mins
        if is_moved and (self.scales, other.scales) != ("float", "half"):
            return False  # code * scale - 8 * scale may round differently than (code - 8) * scale
        if self.scales == "steps":
            nested = self.group == other.group
        else:
            nested = other.group % self.group == 0 if self.group else other.group == 0
        bits = 8 if other.values and not self.values else other.bits
        return (
            nested
            and self.floats == other.floats
            and self.values in ((), other.values)
            and self.bits >= bits
            and self.scales in (other.scales, "float")
            and self.mins >= other.mins
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """Formats of a weight whose rows have different ones.

    Attributes:
        parts: Number of rows and format of each part, from the first row on.
    """

    parts: tuple[tuple[int, Format], ...]

    @property
    def name(self) -> str:
        """Rows and names of the formats, as `form_named` reads them."""
        return " + ".join(f"{rows} {form.name}" for rows, form in self.parts)

    def at(self, row: int) -> Format:
        """Return the format of a row."""
        for rows, form in self.parts:
            if row < rows:
                return form
            row -= rows
        raise IndexError(f"row {row} is not within the parts of {self.name}.")


FORMATS = {
    each.name: each
    for each in (
        Format("int8", 8, 0, scales="float"),
        Format("int8-32", 8, GROUP),
        Format("int4-32", 4, GROUP),
        # formats of GGUF files: Q5_0, Q4_1, Q5_1, Q4_K, Q5_K, Q6_K
        Format("int5-32", 5, GROUP),
        Format("int4-32-min-half", 4, GROUP, mins=True),
        Format("int5-32-min-half", 5, GROUP, mins=True),
        Format("int4-32-steps", 4, GROUP, scales="steps", mins=True),
        Format("int5-32-steps", 5, GROUP, scales="steps", mins=True),
        Format("int6-16-steps", 6, 16, scales="steps"),
        # IQ4_NL, IQ4_XS, MXFP4
        Format("iq4-32", 4, GROUP, values=_IQ4),
        Format("iq4-32-steps", 4, GROUP, scales="steps", values=_IQ4),
        Format("mxfp4-32", 4, GROUP, scales="exponents", values=_FP4),
        # parameters whose tensors have different formats
        Format("int8-16-wide", 8, 16, scales="float"),
        Format("int4-32-min", 4, GROUP, scales="float", mins=True),
        Format("int8-32-min", 8, GROUP, scales="float", mins=True),
        Format("int8-16-min", 8, 16, scales="float", mins=True),
        # formats of compressed-tensors, GPTQ and AWQ
        Format("int4-32-wide", 4, GROUP, scales="float"),
        Format("int4-64-wide", 4, 64, scales="float"),
        Format("int4-64-min", 4, 64, scales="float", mins=True),
        Format("int4-128-wide", 4, 128, scales="float"),
        Format("int4-128-min", 4, 128, scales="float", mins=True),
        Format("int8-128-wide", 8, 128, scales="float"),
    )
}
FP8 = Format("fp8", 8, 0, scales="float", floats=True)
FILE = "file"  # `EngineConfig.quantization`: the formats of a quantized checkpoint
# Other values of `EngineConfig.quantization`: the formats of the layers and of the head.
QUANTIZATIONS = {
    "int8": (FORMATS["int8"], FORMATS["int8"]),
    "int8-32": (FORMATS["int8-32"], FORMATS["int8-32"]),
    "int4": (FORMATS["int4-32"], FORMATS["int8-32"]),
    "fp8": (FP8, FP8),
}


def form_named(name: str) -> Format | Stack:
    """Return a format or a stack by its name. Raise `KeyError` or `ValueError` for another name."""
    if name in FORMATS:
        return FORMATS[name]
    if name == FP8.name:
        return FP8
    parts = [part.split(" ") for part in name.split(" + ")]
    return Stack(tuple((int(rows), FORMATS[form]) for rows, form in parts))


def parts_of(form: Format | Stack, rows: int) -> tuple[tuple[int, Format], ...]:
    """Return the number of rows and the format of each part of a weight with `rows` rows."""
    return form.parts if isinstance(form, Stack) else ((rows, form),)


def bounds_of(segments: tuple[int, ...] | None, columns: int, form: Format) -> tuple[int, ...]:
    """Return the bounds of a quantized weight's segments.

    Each segment must begin at a multiple of the columns that share an input's scale, or of 4 if a
    segment has one scale. If the requested ones do, they are returned. If not, segments of equal
    width are merged by two, four or eight, whichever suffices first. Segments of other widths
    become a single one.
    """
    if segments is None or form.floats:
        return (0, columns)
    unit, count = form.input_group or 4, len(segments) - 1
    widths = {last - first for first, last in pairwise(segments)}
    for merged in (1, 2, 4, 8):
        bounds = segments[::merged]
        if count % merged == 0 and not any(bound % unit for bound in bounds[:-1]):
            return bounds
        if len(widths) > 1:
            break
    return (0, columns)


def groups_of(bounds: tuple[int, ...], form: Format) -> list[tuple[int, int]]:
    """Return the first and last column of each group, segment by segment."""
    return _cut(bounds, form.group)


def input_groups_of(bounds: tuple[int, ...], form: Format) -> list[tuple[int, int]]:
    """Return the first and last column of each group of a product's input."""
    return _cut(bounds, form.input_group)


def _cut(bounds: tuple[int, ...], size: int) -> list[tuple[int, int]]:
    if not size:
        return list(pairwise(bounds))
    return [(first, min(first + size, bounds[-1])) for first in range(0, bounds[-1], size)]


def widest(forms: Iterable[Format], columns: int = 0) -> Format:
    """Return the smallest format that holds the contents of all these formats. Steps are excluded
    if they do not divide `columns`, since a part of a row may then begin within one.
    """
    wanted = tuple(forms)
    candidates = (
        form
        for form in FORMATS.values()
        if all(form.holds(each) for each in wanted)
        and not (form.scales == "steps" and columns % STEP)
    )
    return min(candidates, key=_size)


def fitting(bits: int, group: int, wide: bool, mins: bool) -> Format | None:
    """Return the smallest format with codes of this many bits that holds such codes, or None.

    Args:
        bits: Bits per code.
        group: Number of columns that share a scale, or 0.
        wide: If True, scales are float32, otherwise float16.
        mins: If True, there are minima, in float32.
    """
    wanted = Format("", bits, group, "float" if wide or mins else "half", mins)
    candidates = (form for form in FORMATS.values() if form.bits == bits and form.holds(wanted))
    return min(candidates, key=_size, default=None)


def _size(form: Format) -> tuple[float, int]:
    return form.bytes_per_weight, -form.group
