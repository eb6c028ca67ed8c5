"""What became of the drafts of several engines, as if they were one."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listed
from itertools import zip_longest

from nano_inference.types import SpeculationStats


def joined(each: Listed[SpeculationStats]) -> SpeculationStats | None:
    """The sums by source and place. What a step costs is that of the first which has measured it;
    None: there is no engine with drafts.
    """
    if not each:
        return None
    measured = next((one for one in each if one.step_rows), each[0])
    return SpeculationStats(
        sources=tuple(dict.fromkeys(name for one in each for name in one.sources)),
        drafted=_sums(one.drafted for one in each),
        accepted=_sums(one.accepted for one in each),
        step_rows=measured.step_rows,
        step_seconds=measured.step_seconds,
    )


def counted(stats: SpeculationStats) -> SpeculationStats:
    """What still counts of an engine that is gone."""
    return SpeculationStats(sources=(), drafted=stats.drafted, accepted=stats.accepted)


def _sums(each: Iterable[Mapping[str, Listed[int]]]) -> dict[str, tuple[int, ...]]:
    total: dict[str, tuple[int, ...]] = {}
    for counts in each:
        for name, places in counts.items():
            pairs = zip_longest(total.get(name, ()), places, fillvalue=0)
            total[name] = tuple(map(sum, pairs))
    return total
