"""The formats of weights in 8 and 4 bits. `ops.quantised` defines their arithmetic. This module
must not import torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

GROUP = 32


@dataclass(frozen=True, slots=True)
class Format:
    """Storage format of a weight.

    Attributes:
        name: Name of the format.
        bits: Bits per code, 8 or 4. Codes of 8 bits are -128 to 127, codes of 4 bits 0 to 15.
            Without a minimum, the latter represent -8 to 7.
        group: Number of columns that share a scale. 0: a whole segment.
        wide: If True, scales are float32, otherwise float16.
        mins: If True, a group also has a float32 minimum.
    """

    name: str
    bits: int
    group: int
    wide: bool = False
    mins: bool = False

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight of long rows, including a share of the scale."""
        return self.bits / 8 + (self.group_bytes / self.group if self.group else 0)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's scale and minimum."""
        return (4 if self.wide else 2) + (4 if self.mins else 0)

    @property
    def middle(self) -> int:
        """Code that represents 0 if codes have no sign and the format has no minimum."""
        return 0 if self.bits == 8 else 1 << (self.bits - 1)

    def holds(self, other: "Format") -> bool:
        """Return True if this format stores weights of another format bit for bit. A format with
        group 0 only qualifies if a row has one segment.
        """
        if self.bits == 4 and self.mins and not other.mins and other.wide:
            return False  # code * scale - 8 * scale may round differently than (code - 8) * scale
        nested = other.group % self.group == 0 if self.group else other.group == 0
        return (
            nested
            and self.bits >= other.bits
            and self.wide >= other.wide
            and self.mins >= other.mins
        )


FORMATS = {
    each.name: each
    for each in (
        Format("int8", 8, 0, wide=True),
        Format("int8-32", 8, GROUP),
        Format("int4-32", 4, GROUP),
        # formats of GGUF files, in order: Q6_K/Q3_K, Q4_K/Q4_1, Q5_K/Q5_1, Q2_K
        Format("int8-16-wide", 8, 16, wide=True),
        Format("int4-32-min", 4, GROUP, wide=True, mins=True),
        Format("int8-32-min", 8, GROUP, wide=True, mins=True),
        Format("int8-16-min", 8, 16, wide=True, mins=True),
        # formats of compressed-tensors, GPTQ and AWQ
        Format("int4-32-wide", 4, GROUP, wide=True),
        Format("int4-64-wide", 4, 64, wide=True),
        Format("int4-64-min", 4, 64, wide=True, mins=True),
        Format("int4-128-wide", 4, 128, wide=True),
        Format("int4-128-min", 4, 128, wide=True, mins=True),
        Format("int8-128-wide", 8, 128, wide=True),
    )
}
FILE = "file"  # `EngineConfig.quantization`: the formats of a quantized checkpoint
# Other values of `EngineConfig.quantization`: the formats of the layers and of the head.
QUANTIZATIONS = {
    "int8": (FORMATS["int8"], FORMATS["int8"]),
    "int8-32": (FORMATS["int8-32"], FORMATS["int8-32"]),
    "int4": (FORMATS["int4-32"], FORMATS["int8-32"]),
}


def bounds_of(segments: tuple[int, ...] | None, columns: int, form: Format) -> tuple[int, ...]:
    """Return the bounds of a quantized weight's segments. These are the requested ones if each
    begins at a whole group and at a multiple of 4 columns. Otherwise there is a single segment.
    """
    unit = form.group or 4
    if segments is None or any(bound % unit for bound in segments[:-1]):
        return (0, columns)
    return segments


def groups_of(bounds: tuple[int, ...], form: Format) -> list[tuple[int, int]]:
    """Return the first and last column of each group, segment by segment."""
    if not form.group:
        return list(pairwise(bounds))
    return [
        (first, min(first + form.group, bounds[-1])) for first in range(0, bounds[-1], form.group)
    ]


def widest(forms: Iterable[Format]) -> Format:
    """Return the smallest format that holds the contents of all these formats."""
    wanted = tuple(forms)
    candidates = (form for form in FORMATS.values() if all(form.holds(each) for each in wanted))
    return min(candidates, key=_size)


def fitting(bits: int, group: int, wide: bool, mins: bool) -> Format | None:
    """Return the smallest format with codes of this many bits that holds such codes, or None. The
    arguments are attributes of `Format`.
    """
    wanted = Format("", bits, group, wide, mins)
    candidates = (form for form in FORMATS.values() if form.bits == bits and form.holds(wanted))
    return min(candidates, key=_size, default=None)


def _size(form: Format) -> tuple[float, int]:
    return form.bytes_per_weight, -form.group
