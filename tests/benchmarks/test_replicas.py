"""The parts of the replica benchmark that need no engine."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import replicas
from benchmarks.replicas import Shape, asked, router_row
from nano_inference.fleet.router import Router, Ticket


@pytest.mark.thorough(cases=["True"])
@pytest.mark.parametrize("just_read", [False, True])
def test_report_has_a_row_for_router_time(just_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=3000)  # ticks of a clock that is read twice per request

    class Counted(Router):
        placed = 0

        def place(self, *args: Any, **options: Any) -> Ticket:
            Counted.placed += 1
            return super().place(*args, **options)

    monkeypatch.setattr(replicas, "Router", Counted)
    monkeypatch.setattr(replicas, "time", SimpleNamespace(perf_counter_ns=lambda: next(ticks)))
    row = router_row(300, 5, 2, just_read, requests=40)
    assert Counted.placed == 2 * 40
    assert row["us"]["median"] == pytest.approx(3.0)  # per request, not in total
    assert (row["prompt_tokens"], row["replicas"], row["just_read"]) == (300, 5, just_read)
    json.dumps(row)


def test_prompts_share_no_prefix_and_are_deterministic() -> None:
    work = asked(Shape(4, 8, 16), 1, 100)
    assert work == asked(Shape(4, 8, 16), 1, 100)
    assert len({tuple(prompt) for prompt, _ in work}) == 4
    assert [params.seed for _, params in work] == [0, 1, 2, 3]
