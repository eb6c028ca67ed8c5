"""Tables of a load's figures for a terminal, and a row per request for a report."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from nano_bench.outcomes import Load, Outcome, gaps

LATENCIES = {
    "first token": "first_token_ms",
    "between two pieces": "between_tokens_ms",
    "each further token": "per_token_ms",
    "whole answer": "whole_ms",
}
PERCENTS = ("p50", "p90", "p99", "p100")


def figures(row: Mapping[str, Any], more: Mapping[str, str] | None = None) -> Table:
    """Return a table of a load's counts and rates, then of `more`."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["errors_by_kind"].items())
    ways = row["counted_by"]
    shown = {
        "requests": f"{row['requests']:,}",
        "failed": f"{row['errors']:,}" + f" ({kinds})" * bool(kinds),
        "seconds": f"{row['seconds']:,.2f}",
        "requests/s": f"{row['requests_per_s']:,.2f}",
        "output tokens/s": f"{row['output_tokens_per_s']:,.1f}",
        "output tokens": f"{row['output_tokens']:,}"
        + f", counted by {' and '.join(ways)}" * bool(ways),
        "prompt tokens": f"{row['prompt_tokens']:,}, of them cached {row['cached_tokens']:,}",
    }
    if row["tokens_per_event"] is not None:
        shown["tokens in a piece"] = f"{row['tokens_per_event']:.2f}"
    if "within_limits" in row:
        shown["within limits"] = f"{row['within_limits']:,} ({row['within_limits_share']:.1%})"
        shown["goodput, requests/s"] = f"{row['goodput_per_s']:,.2f}"
    if len(row["cpu_s"]) > 1:
        shown["CPU s"] = ", ".join(f"{name} {spent:.2f}" for name, spent in row["cpu_s"].items())
    table = Table.grid(padding=(0, 2))
    for name, text in (shown | dict(more or {})).items():
        table.add_row(name, text)
    return table


def latencies(
    row: Mapping[str, Any],
    names: Mapping[str, str] = LATENCIES,
    percents: Sequence[str] = PERCENTS,
) -> Table:
    """Return a table of percentiles, by the names of figures in `row`."""
    table = Table()
    columns = ["max" if each == "p100" else each for each in percents]
    for index, column in enumerate(("milliseconds", *columns)):
        table.add_column(column, justify="right" if index else "left")
    for name, key in names.items():
        values: dict[str, float] = row[key] or {}
        table.add_row(name, *(f"{values[p]:,.1f}" if p in values else "-" for p in percents))
    return table


def within(done: Load, limits: dict[str, float]) -> dict[str, Any]:
    """Return the figures of the requests within limits. Empty without limits."""
    if not limits:
        return {}
    count = done.within(limits)
    return {
        "within_limits": count,
        "within_limits_share": round(count / max(len(done.outcomes), 1), 4),
        "goodput_per_s": round(count / max(done.seconds, 1e-9), 4),
    }


def request_row(one: Outcome, began: float) -> dict[str, Any]:
    """Return the row of a request. Times are seconds since the load began."""
    return {
        "began_s": round(one.began - began, 6),
        "first_token_s": None if one.first_token is None else round(one.first_token, 6),
        "longest_gap_s": round(max(gaps(one.pieces)), 6) if one.pieces[1:] else None,
        "whole_s": round(one.ended - one.began, 6),
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "output_tokens": one.tokens,
        "counted_by": None if one.error else one.counted_by,
        "error_kind": one.kind,
        "error": one.error,
    }
