"""Repeats, medians and machine descriptions, shared by all benchmarks.

All engines warm up by one rule: one run on the same prompt shapes with other token ids and
completions cut to 32 tokens. Every timed run then starts from an empty prefix cache. The hand-over
between the cores is measured right before and right after each timed run.
"""

import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import machine

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
console = Console()
if not console.is_terminal:  # files and pipes have no width
    console.width = 140


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Return median, extremes and all runs."""
    runs = [round(value, 6) for value in values]
    return {"median": statistics.median(runs), "min": min(runs), "max": max(runs), "runs": runs}


class Stopwatch:
    """Times of one repeated measurement, each with the hand-over between the cores before and after
    it.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.handovers: list[tuple[float | None, float | None]] = []

    def time(self, run: Callable[[], Any]) -> Any:
        """Run and record. Return the result of `run`."""
        before = machine.handover_ns()
        began = time.perf_counter()
        result = run()
        self.add(time.perf_counter() - began, before)
        return result

    def add(self, seconds: float, before: float | None) -> None:
        """Record a run timed elsewhere. `before` is the hand-over before it."""
        self.seconds.append(seconds)
        self.handovers.append((before, machine.handover_ns()))

    def row(self, **figures: Any) -> Row:
        """Return a row of a report: the arguments and the times."""
        return figures | {
            "seconds": spread(self.seconds),
            "handover_ns": [list(pair) for pair in self.handovers],
            "placement": machine.placement(self.handovers),
        }

    def rates(self, count: float) -> dict[str, Any]:
        """Convert times to a rate, for `count` things per run."""
        return spread(count / seconds for seconds in self.seconds)


def write(
    command: str,
    rows: list[Row],
    options: dict[str, Any],
    out: Path | None,
    model: str | None = None,
) -> Path:
    """Write a report. Rows of an earlier report are kept if no new row has their `name`.

    You can therefore run a long benchmark workload by workload. Each row records its date and
    commit.
    """
    suffix = f"-{Path(model).name}" if model and model != "smollm2-135m" else ""
    path = out or RESULTS / f"{command}{suffix}.json"
    stamp = {"commit": machine.commit(), "date": datetime.date.today().isoformat()}
    new = [row | stamp for row in rows]
    names = {row["name"] for row in new}
    old = json.loads(path.read_text()).get("rows", []) if path.exists() else []
    report = {
        "command": command,
        "model": model,
        "options": options,
        "machine": machine.machine(),
        "versions": machine.versions(),
        "rows": [row for row in old if row["name"] not in names] + new,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written: {path}", soft_wrap=True)
    return path


def show(title: str, columns: dict[str, Callable[[Row], Any]], rows: list[Row]) -> None:
    """Print rows as a table. A column whose entry is a spread shows its median and extremes."""
    table = Table(title=escape(title), title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell(value(row))) for value in columns.values()))
    console.print(table)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        if len(value["runs"]) == 1:
            return number(value["median"])
        return f"{number(value['median'])} [{number(value['min'])}..{number(value['max'])}]"
    return number(value) if isinstance(value, float) else str(value)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
