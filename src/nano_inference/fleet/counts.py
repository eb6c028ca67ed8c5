"""`FleetCounts`: the joint statistics of a fleet's engines, including engines that have ended."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from nano_inference.drafts.joined import counted, joined
from nano_inference.types import EngineStats, SpeculationStats

# Counted from an engine's start. Ended engines still count, so that the sums never fall.
_COUNTED = (
    "num_steps",
    "num_preemptions",
    "tokens_computed",
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "prompt_tokens",
    "prompt_tokens_queried",
    "completion_tokens",
    "grammars_compiled",
    "grammars_failed",
    "grammar_seconds",
    "kept_blocks_written",
    "kept_blocks_read",
)
_NOT_SUMS = (
    "weight_version",
    "kv_use",
    "hit_rate",
    "step_microseconds",
    "ranks_busy",
    "ranks_waiting",
    "speculation",
)


class FleetCounts:
    """Sum of the engines' statistics. Ended engines still count, so that it never falls."""

    def __init__(self) -> None:
        self._gone: Counter[str] = Counter()
        self._gone_drafts: list[SpeculationStats] = []  # at most one, the sum

    def keep(self, stats: EngineStats) -> None:
        """Keep the last statistics of an engine that has ended."""
        self._gone.update({name: getattr(stats, name) for name in _COUNTED})
        if stats.speculation is not None:
            gone = joined([*self._gone_drafts, counted(stats.speculation)])
            self._gone_drafts = [] if gone is None else [gone]

    def joined(self, stats: Sequence[EngineStats], version: int) -> EngineStats:
        """Return the statistics of these engines and of ended ones, as of one engine with this
        weight version.
        """
        total: dict[str, Any] = {
            field.name: sum(getattr(one, field.name) for one in stats) + self._gone[field.name]
            for field in fields(EngineStats)
            if field.name not in _NOT_SUMS
        }
        blocks, steps = total["num_blocks"] or 1, sum(one.num_steps for one in stats) or 1
        asked = total["prompt_tokens_computed"] + total["prompt_tokens_cached"]
        phases = {phase for one in stats for phase in one.step_microseconds}
        drafts = [one.speculation for one in stats if one.speculation is not None]
        return EngineStats(
            **total,
            weight_version=version,
            kv_use=sum(one.kv_use * one.num_blocks for one in stats) / blocks,
            hit_rate=total["prompt_tokens_cached"] / asked if asked else 0.0,
            step_microseconds={
                phase: sum(one.step_microseconds.get(phase, 0.0) * one.num_steps for one in stats)
                / steps
                for phase in sorted(phases)
            },
            ranks_busy=tuple(seconds for one in stats for seconds in one.ranks_busy),
            ranks_waiting=tuple(seconds for one in stats for seconds in one.ranks_waiting),
            speculation=joined([*drafts, *self._gone_drafts]),
        )
