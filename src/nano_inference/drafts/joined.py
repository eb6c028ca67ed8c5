"""Draft statistics of several engines, combined as if they were one."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listed
from itertools import zip_longest

from nano_inference.types import SpeculationStats


def joined(stats: Listed[SpeculationStats]) -> SpeculationStats | None:
    """Return the sums by source and index, or None if no engine drafts.

    Step costs are those of the first engine that measured them.
    """
    if not stats:
        return None
    measured = next((one for one in stats if one.step_rows), stats[0])
    return SpeculationStats(
        sources=tuple(dict.fromkeys(name for one in stats for name in one.sources)),
        drafted=_sums(one.drafted for one in stats),
        accepted=_sums(one.accepted for one in stats),
        step_rows=measured.step_rows,
        step_seconds=measured.step_seconds,
    )


def counted(stats: SpeculationStats) -> SpeculationStats:
    """Return the part of a stopped engine's statistics that still counts."""
    return SpeculationStats(sources=(), drafted=stats.drafted, accepted=stats.accepted)


def _sums(tables: Iterable[Mapping[str, Listed[int]]]) -> dict[str, tuple[int, ...]]:
    total: dict[str, tuple[int, ...]] = {}
    for counts in tables:
        for name, places in counts.items():
            pairs = zip_longest(total.get(name, ()), places, fillvalue=0)
            total[name] = tuple(map(sum, pairs))
    return total
