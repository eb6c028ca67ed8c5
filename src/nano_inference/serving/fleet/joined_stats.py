"""Statistics of several engines as if they were one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from nano_inference.types import EngineStats

# Counted from an engine's start on: of one that is gone they still count, or a sum would fall.
_COUNTED = (
    "num_steps",
    "num_preemptions",
    "tokens_computed",
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "prompt_tokens",
    "prompt_tokens_queried",
    "completion_tokens",
)
_NOT_SUMS = ("kv_use", "hit_rate", "step_microseconds", "ranks_busy", "ranks_waiting")


def counted(stats: EngineStats) -> dict[str, int]:
    """What an engine has counted since it was built."""
    return {name: getattr(stats, name) for name in _COUNTED}


def joined_stats(each: Sequence[EngineStats], gone: Counter[str]) -> EngineStats:
    """Of engines that live, and of what those had counted that are gone (`counted`)."""
    total: dict[str, Any] = {
        field.name: sum(getattr(one, field.name) for one in each) + gone[field.name]
        for field in fields(EngineStats)
        if field.name not in _NOT_SUMS
    }
    blocks, steps = total["num_blocks"] or 1, sum(one.num_steps for one in each) or 1
    asked = total["prompt_tokens_computed"] + total["prompt_tokens_cached"]
    phases = {phase for one in each for phase in one.step_microseconds}
    return EngineStats(
        **total,
        kv_use=sum(one.kv_use * one.num_blocks for one in each) / blocks,
        hit_rate=total["prompt_tokens_cached"] / asked if asked else 0.0,
        step_microseconds={
            phase: sum(one.step_microseconds.get(phase, 0.0) * one.num_steps for one in each)
            / steps
            for phase in sorted(phases)
        },
        ranks_busy=tuple(seconds for one in each for seconds in one.ranks_busy),
        ranks_waiting=tuple(seconds for one in each for seconds in one.ranks_waiting),
    )
