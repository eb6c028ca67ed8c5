"""Figures of a replay, in addition to those of every load."""

from collections.abc import Iterator, Sequence
from typing import Any

from nano_bench.figures import request_row
from nano_bench.load import NOT_SENT
from nano_bench.outcomes import Load, shares
from nano_bench.traces.replay import Played

_PERCENTS = (50, 90, 95, 99, 100)
LATENCIES = {
    "first token, first turns": "first_turn_first_token_ms",
    "first token, later turns": "later_turn_first_token_ms",
    "between two pieces": "between_tokens_ms",
    "each further token": "per_token_ms",
    "turn": "turn_ms",
}
PERCENTS = tuple(f"p{each}" for each in _PERCENTS)


def trace_row(done: Load, played: Sequence[Played]) -> dict[str, Any]:
    """Return figures of a report. Shares are None if they are unknown."""
    good = [each for each in played if each.outcome.error is None]
    with_cache = [each.outcome for each in good if each.outcome.cached_tokens is not None]
    named = [each for each in good if each.reusable is not None]
    return {
        "sessions": len({each.conversation for each in played if not each.depth}),
        "turns": len(played),
        "turns_answered": len(good),
        "turns_of_subagents": sum(each.depth > 0 for each in played),
        "turns_not_sent": sum(each.outcome.kind == NOT_SENT for each in played),
        "hit_share": _share(
            sum(each.cached_tokens or 0 for each in with_cache),
            sum(each.prompt_tokens for each in with_cache),
        ),
        "possible_hit_share": _share(
            sum(each.reusable or 0 for each in named), sum(_tokens(each) for each in named)
        ),
        "turn_ms": shares([each.outcome.ended - each.outcome.began for each in good], *_PERCENTS),
        "first_turn_first_token_ms": shares(_first_tokens(good, later=False), *_PERCENTS),
        "later_turn_first_token_ms": shares(_first_tokens(good, later=True), *_PERCENTS),
        "between_tokens_ms": shares(done.gaps, *_PERCENTS),
        "per_token_ms": shares(
            [each.outcome.per_token for each in good if each.outcome.per_token is not None],
            *_PERCENTS,
        ),
    }


def trace_rows(done: Load, played: Sequence[Played]) -> Iterator[dict[str, Any]]:
    """Yield a row per turn in order of their start."""
    for one in played:
        yield {
            "conversation": one.conversation,
            "turn": one.index,
            "depth": one.depth,
            "line": one.turn.line,
            "reusable_tokens": one.reusable,
        } | request_row(one.outcome, done.began)


def lines(row: dict[str, Any]) -> dict[str, str]:
    """Return lines for the table of figures."""
    turns = f"{row['turns_answered']:,} of {row['turns']:,}"
    if row["turns_of_subagents"]:
        turns += f", {row['turns_of_subagents']:,} of subagents"
    return {
        "sessions": f"{row['sessions']:,}",
        "turns answered": turns,
        "hits": f"{_percent(row['hit_share'])} of prompt tokens, "
        f"{_percent(row['possible_hit_share'])} in a cache without limits",
    }


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _tokens(played: Played) -> int:
    blocks = played.turn.blocks
    return 0 if blocks is None else blocks.position(blocks.length)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _first_tokens(played: Sequence[Played], *, later: bool) -> list[float]:
    times = (each.outcome.first_token for each in played if (each.index > 0) == later)
    return [seconds for seconds in times if seconds is not None]
