"""Where a row-parallel product is cut: eight segments at fixed columns. Without torch."""

from collections.abc import Sequence
from itertools import pairwise

SEGMENTS = 8  # of a row-parallel product; more ranks than that change its bits


def row_segments(columns: int, unit: int) -> tuple[int, ...]:
    """Bounds of the eight segments: rising, the first 0, the last `columns`. Each begins with a
    whole unit; some may be empty.
    """
    units = -(-columns // unit)
    return tuple(min(units * index // SEGMENTS * unit, columns) for index in range(SEGMENTS + 1))


def segment_unit(columns: int) -> int:
    """Of which units the segments of an MLP are made: the largest that leaves none of them empty,
    at least 2.
    """
    return next(
        (unit for unit in (32, 16) if columns % unit == 0 and columns >= SEGMENTS * unit), 2
    )


def check_segments(segments: Sequence[int], columns: int) -> None:
    """Raises ValueError unless these are the bounds of 1, 2, 4 or 8 segments of so many columns."""
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
