"""The test tiers: the tests and example counts of each."""

import pytest

from tests import depth


@pytest.mark.parametrize(
    ("tier", "chosen"),
    [
        ("quick", {(False, False), (False, True)}),
        ("rest", {(True, False), (True, True), (False, True)}),
        ("all", {(False, False), (False, True), (True, False), (True, True)}),
    ],
)
def test_runs_by_tier(
    monkeypatch: pytest.MonkeyPatch, tier: str, chosen: set[tuple[bool, bool]]
) -> None:
    monkeypatch.setattr(depth, "tier", tier)
    every = [(thorough, deeper) for thorough in (False, True) for deeper in (False, True)]
    assert {each for each in every if depth.runs(*each)} == chosen
    assert depth.at_depth(100) == (25 if tier == "quick" else 100)
    assert depth.at_depth(8) == (5 if tier == "quick" else 8)
    assert depth.at_depth(3) == 3


def test_is_thorough_by_cases() -> None:
    assert depth.is_thorough(None, None, ())
    assert depth.is_thorough("slow", ["slow"], ())
    assert not depth.is_thorough("quick", ["slow"], ())
    assert depth.is_thorough("slow", None, ["quick"])
    assert not depth.is_thorough("quick", None, ["quick"])
