"""Repeats, placements, percentiles and reports."""

import json
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import names, numbers, settings
from benchmarks.machine import placement
from benchmarks.measure import Stopwatch, cell, spread, write
from nano_bench.outcomes import percentile


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=200), st.integers(1, 100))
def test_percentile_is_a_measured_value(values: list[float], share: int) -> None:
    percentile_value = percentile(values, share)
    assert percentile_value in values
    assert sum(value <= percentile_value for value in values) >= share / 100 * len(values)
    assert sum(value < percentile_value for value in values) < share / 100 * len(values)


def test_placement_says_whether_the_cores_moved() -> None:
    assert placement([(50.0, 60.0), (55.0, 90.0)]) == "near"
    assert placement([(310.0, 305.0)]) == "far"
    assert placement([(50.0, 310.0)]) == "moved"
    assert placement([(None, None)]) == "unknown"


def test_stopwatch_keeps_every_run() -> None:
    watch = Stopwatch()
    assert [watch.time(lambda: 7), watch.time(lambda: 8)] == [7, 8]
    row = watch.row(name="x")
    assert len(row["seconds"]["runs"]) == len(row["handover_ns"]) == 2
    assert row["name"] == "x"
    assert watch.rates(10)["min"] == pytest.approx(10 / max(watch.seconds), rel=1e-3)


def test_report_keeps_rows_that_were_not_remeasured(tmp_path: Path) -> None:
    out = tmp_path / "sub" / "report.json"
    write("throughput", [{"name": "a", "value": 1}, {"name": "b", "value": 1}], {}, out)
    write("throughput", [{"name": "b", "value": 2}], {}, out)
    report = json.loads(out.read_text())
    assert {row["name"]: row["value"] for row in report["rows"]} == {"a": 1, "b": 2}
    assert all(row["commit"] and row["date"] for row in report["rows"])
    assert report["machine"]["cores"] >= 1


def test_cell_shows_the_spread() -> None:
    assert cell(spread([1.0, 3.0, 2.0])) == "2 [1..3]"
    assert cell(spread([12345.6])) == "12,346"
    assert cell(None) == "-"


def test_lists_on_the_command_line() -> None:
    assert names("W1, W2", ("W1", "W2", "W3")) == ("W1", "W2")
    assert numbers("128,512") == (128, 512)
    assert settings("all", ("a, b", "c")) == ("a, b", "c")
    assert settings("a, b;c", ("a, b", "c")) == ("a, b", "c")
    assert settings("", ("a",)) == ()
    for wrong in ("W9", ""):
        with pytest.raises(typer.BadParameter):
            names(wrong, ("W1",))
