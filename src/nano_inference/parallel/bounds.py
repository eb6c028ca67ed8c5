"""Segment bounds of row-parallel products: eight segments at fixed columns.

Independent of torch.
"""

from collections.abc import Sequence
from itertools import pairwise

SEGMENTS = 8  # segments of a row-parallel product: more ranks would change its bits


def row_segments(columns: int, unit: int) -> tuple[int, ...]:
    """Return the bounds of the eight segments, ascending from 0 to `columns`.

    Each segment begins at a multiple of `unit`. Segments may be empty.
    """
    units = -(-columns // unit)
    return tuple(min(units * index // SEGMENTS * unit, columns) for index in range(SEGMENTS + 1))


def segment_unit(columns: int) -> int:
    """Return the unit of an MLP's segments: the largest without empty segments, at least 2."""
    return next(
        (unit for unit in (32, 16) if columns % unit == 0 and columns >= SEGMENTS * unit), 2
    )


def check_segments(segments: Sequence[int], columns: int) -> None:
    """Raise `ValueError` unless these are the bounds of 1, 2, 4 or 8 segments."""
    rising = all(first <= second for first, second in pairwise(segments))
    if (
        len(segments) - 1 not in (1, 2, 4, SEGMENTS)
        or not rising
        or segments[0] != 0
        or segments[-1] != columns
    ):
        raise ValueError(
            f"segments {tuple(segments)} are not the bounds of 1, 2, 4 or 8 pieces of {columns} "
            "columns."
        )
