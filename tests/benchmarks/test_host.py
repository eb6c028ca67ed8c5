"""The host benchmark steps through each of its cases."""

import pytest

from benchmarks.host import CASES, Case, measure


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.running <= 64],
    ids=lambda case: f"{case.name} of {case.running}",
)
def test_host_counts_tokens_of_each_case(case: Case) -> None:
    (row,) = measure(windows=1, steps=2, cases=(case,))
    assert row.tokens_per_step == case.running
