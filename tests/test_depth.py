"""The tests that `make test` leaves out are there."""

import re
from pathlib import Path

import pytest

from tests import depth

ROOT = Path(__file__).parents[1]


def test_every_thorough_test_is_there() -> None:
    names = depth.thorough()
    missing = {
        name
        for name in names
        if not (ROOT / name.partition("::")[0]).exists()
        or f"def {_function(name)}(" not in (ROOT / name.partition("::")[0]).read_text()
    }
    assert names
    assert not missing, "run scripts/tiers.py, or edit tests/thorough.txt"


def _function(name: str) -> str:
    return re.sub(r"\[.*", "", name).rpartition("::")[2]


NAMES = {"tests/a.py::test_all", "tests/a.py::test_some[slow]"}
QUICK, PROPERTY = "tests/a.py::test_some[quick]", "tests/a.py::test_property"
THOROUGH = ("tests/a.py::test_all", "tests/a.py::test_all[case]", "tests/a.py::test_some[slow]")


@pytest.mark.parametrize(
    ("tier", "chosen"),
    [
        ("quick", {QUICK, PROPERTY}),
        ("rest", {*THOROUGH, PROPERTY}),
        ("all", {QUICK, *THOROUGH, PROPERTY}),
    ],
)
def test_tiers(monkeypatch: pytest.MonkeyPatch, tier: str, chosen: set[str]) -> None:
    monkeypatch.setattr(depth, "tier", tier)
    everything = (QUICK, PROPERTY, *THOROUGH)
    assert {name for name in everything if depth.runs(name, name == PROPERTY, NAMES)} == chosen
    assert depth.at_depth(100) == (25 if tier == "quick" else 100)
    assert depth.at_depth(8) == (5 if tier == "quick" else 8)
    assert depth.at_depth(3) == 3
