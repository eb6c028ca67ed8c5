"""Results of a check: a file per part, written after every row, and one combined report."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.published import PUBLISHED
from benchmarks.measure import Row, cell, console, spread

PARTS = "parts"
MOST_STACK = 4000  # characters of an exception's stack


class Part:
    """Rows of one part, which stay on disk if a later measurement fails or takes too long."""

    def __init__(self, out: Path, name: str) -> None:
        self.name = name
        self.rows: list[Row] = []
        self._path = out / PARTS / f"{name}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)

    def add(
        self,
        name: str,
        runs: Iterable[float],
        unit: str,
        *,
        note: str = "",
        at_least: float | None = None,
        at_most: float | None = None,
        **more: Any,
    ) -> float:
        """Add a figure, optionally with its target, and return its median."""
        figure = spread(runs)
        row: Row = {
            "part": self.name,
            "name": name,
            "figure": figure,
            "unit": unit,
            "note": note,
        } | more
        if at_least is not None:
            row |= {"target": f">= {at_least:g}", "met": figure["median"] >= at_least}
        if at_most is not None:
            row |= {"target": f"<= {at_most:g}", "met": figure["median"] <= at_most}
        self._write(row)
        return figure["median"]

    def fail(self, name: str, problem: str, stack: str = "") -> None:
        """Record a failed measurement and its reason. `stack` is the end of the exception's
        traceback.
        """
        row = {"part": self.name, "name": name, "problem": problem[:500]}
        self._write(row | ({"stack": stack[-MOST_STACK:]} if stack else {}))

    def _write(self, row: Row) -> None:
        self.rows.append(row)
        self._path.write_text(json.dumps(self.rows, indent=1) + "\n")
        console.print(
            f"  {row['name']}: {_value(row)}", markup=False, soft_wrap=True, highlight=False
        )


def ratio(ours: float, whole: float) -> float:
    """Return a share, or 0 if the divisor is 0."""
    return ours / whole if whole else 0.0


def rows_of(out: Path) -> list[Row]:
    """Return all rows on disk, part by part in the order of writing."""
    files = sorted((out / PARTS).glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [row for file in files for row in json.loads(file.read_text())]


def median_of(out: Path, part: str, name: str) -> float | None:
    """Return the median of an earlier part's figure, or None if it is missing."""
    found = [
        row
        for row in rows_of(out)
        if row["part"] == part and row["name"] == name and "figure" in row
    ]
    return found[0]["figure"]["median"] if found else None


def runs_of(out: Path, part: str) -> dict[str, list[float]]:
    """Return the runs of every figure of a part by name."""
    return {
        row["name"]: row["figure"]["runs"]
        for row in rows_of(out)
        if row["part"] == part and "figure" in row
    }


def write_report(out: Path, described: dict[str, Any], stages: list[dict[str, Any]]) -> Path:
    """Write OUT/gpu.json and print its tables."""
    rows = rows_of(out)
    published = [each._asdict() for each in PUBLISHED]
    report = {
        "machine": described,
        "stages": stages,
        "rows": rows,
        "published_by_others": published,
    }
    path = out / "gpu.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    console.print("\n".join(lines_of(report)), soft_wrap=True, markup=False, highlight=False)
    console.print(f"written: {path}", soft_wrap=True, markup=False)
    return path


def lines_of(report: dict[str, Any]) -> list[str]:
    """Format a report as text: one line per figure, with its extremes and its target."""
    lines = ["", *(f"{key}: {value}" for key, value in report["machine"].items()), "", "stages"]
    for stage in report["stages"]:
        lines.append(
            f"  {stage['stage']:<14} {stage['seconds']:>4} s of {stage['limit']:>4}  "
            f"{stage['ended']}"
        )
    width = max((len(row["name"]) for row in report["rows"]), default=0)
    part = None
    for row in report["rows"]:
        if row["part"] != part:
            part = row["part"]
            lines += ["", part]
        lines.append(f"  {row['name']:<{width}}  {_value(row)}")
    lines += ["", "published by others on the same workload; not measured here"]
    for each in report["published_by_others"]:
        lines.append(
            f"  {each['engine']:<18} {each['card']:<16} {each['tokens_per_s']:>9,.0f} tok/s  "
            f"{each['source']}"
        )
    return lines


def _value(row: Row) -> str:
    if "problem" in row:
        return f"FAILED: {row['problem']}"
    text = f"{cell(row['figure'])} {row['unit']}"
    if "target" in row:
        text += f"  (target {row['target']}: {'met' if row['met'] else 'missed'})"
    return f"{text}  {row['note']}".rstrip()
