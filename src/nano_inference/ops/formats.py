"""The formats of weights in 8 and 4 bits. Nothing here imports torch; `ops.quantised` says what is
computed with them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

GROUP = 32


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is stored.

    Attributes:
        name: of it.
        bits: of a code, 8 or 4. Codes of 8 bits are -128 to 127, those of 4 bits 0 to 15; without a
            minimum these stand for -8 to 7.
        group: columns that have a scale in common; 0: a segment.
        wide: scales are float32; else float16.
        mins: a group has a minimum too, in float32.
    """

    name: str
    bits: int
    group: int
    wide: bool = False
    mins: bool = False

    @property
    def bytes_per_weight(self) -> float:
        """What a weight takes, its part of a scale included, of long rows."""
        return self.bits / 8 + (self.group_bytes / self.group if self.group else 0)

    @property
    def group_bytes(self) -> int:
        """Of the scale of a group, and of its minimum."""
        return (4 if self.wide else 2) + (4 if self.mins else 0)

    @property
    def middle(self) -> int:
        """The code that stands for 0 where codes have no sign and there is no minimum."""
        return 0 if self.bits == 8 else 1 << (self.bits - 1)

    def holds(self, other: "Format") -> bool:
        """Whether it stores weights of another format to the bit; those of group 0 where a row has
        one segment.
        """
        if self.bits == 4 and self.mins and not other.mins and other.wide:
            return False  # 8 scales, as a minimum, lose digits of a float32
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
        # what GGUF files hold: Q6_K and Q3_K; Q4_K and Q4_1; Q5_K and Q5_1; Q2_K
        Format("int8-16-wide", 8, 16, wide=True),
        Format("int4-32-min", 4, GROUP, wide=True, mins=True),
        Format("int8-32-min", 8, GROUP, wide=True, mins=True),
        Format("int8-16-min", 8, 16, wide=True, mins=True),
        # what compressed-tensors, GPTQ and AWQ hold
        Format("int4-32-wide", 4, GROUP, wide=True),
        Format("int4-64-wide", 4, 64, wide=True),
        Format("int4-64-min", 4, 64, wide=True, mins=True),
        Format("int4-128-wide", 4, 128, wide=True),
        Format("int4-128-min", 4, 128, wide=True, mins=True),
        Format("int8-128-wide", 8, 128, wide=True),
    )
}
FILE = "file"  # `EngineConfig.quantization`: the formats of a quantised checkpoint
# The other ones: the format of a model's layers, and that of its head, by which logits
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
        (first, min(first + form.group, bounds[-1])) for first in range(0, bounds[-1], form.group)
    ]


def widest(forms: Iterable[Format]) -> Format:
    """The smallest format that holds what all of these hold."""
    wanted = tuple(forms)
    found = (form for form in FORMATS.values() if all(form.holds(each) for each in wanted))
    return min(found, key=_size)


def fitting(bits: int, group: int, wide: bool, mins: bool) -> Format | None:
    """The smallest format of codes of so many bits that holds such ones, see `Format`; None: none
    does.
    """
    wanted = Format("", bits, group, wide, mins)
    found = (form for form in FORMATS.values() if form.bits == bits and form.holds(wanted))
    return min(found, key=_size, default=None)


def _size(form: Format) -> tuple[float, int]:
    return form.bytes_per_weight, -form.group
