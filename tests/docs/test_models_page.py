"""The tables of docs/models.md equal the output of `docs/make_models.py`, and every family, case
and format was measured.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nano_inference.models.spec.families import ARCHITECTURES
from tests.checkpoints.quantisers import QUANTISERS
from tests.models.families import CASES, STATE_CASES
from tests.models.strong import TOLERANCE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models", ROOT / "docs" / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(made: ModuleType) -> Any:
    return json.loads(made.MEASURED.read_text(encoding="utf-8"))


def test_tables_are_current(made: ModuleType, measured: Any) -> None:
    text = made.TARGET.read_text(encoding="utf-8")
    assert made.page(text, measured) == text, "run python docs/make_models.py"


def test_measurements_cover_every_case(measured: Any) -> None:
    """For a new case, run `python -m tests.models.measure --only NAME`."""
    assert measured["cases"].keys() == {**CASES, **STATE_CASES}.keys()
    assert measured["formats"].keys() == QUANTISERS.keys()


def test_measurements_are_exact(measured: Any) -> None:
    for name, case in measured["cases"].items():
        for kind in ("reference", "cpu", "triton"):
            outcome = case[kind]
            assert "refused" in outcome or outcome["difference"] < TOLERANCE, (name, kind)
        for kind in ("schedules", "ranks", "policy"):
            assert "refused" in case[kind] or case[kind]["equal"] == case[kind]["of"] > 0
    for name, measurement in measured["formats"].items():
        assert measurement["difference"] < TOLERANCE, name
        assert measurement["equal"] == measurement["of"] > 0, name


def test_check_fails_for_a_stale_table(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "models.md"
    page.write_text(
        made.TARGET.read_text(encoding="utf-8").replace("| `LlamaForCausalLM` |", "| `Llama` |")
    )
    monkeypatch.setattr(made, "TARGET", page)
    monkeypatch.setattr(sys, "argv", ["make_models.py", "--check"])
    with pytest.raises(SystemExit, match="run python docs/make_models"):
        made.main()
    monkeypatch.setattr(sys, "argv", ["make_models.py"])
    made.main()
    assert page.read_text() == (ROOT / "docs" / "models.md").read_text()


def test_unmeasured_family_is_named(made: ModuleType, measured: Any) -> None:
    without = {n: each for n, each in measured["cases"].items() if "Phi3" not in each["class"]}
    with pytest.raises(KeyError, match="not measured: Phi3ForCausalLM"):
        made.cases_by_class(without)
    assert list(made.cases_by_class(measured["cases"])) == list(ARCHITECTURES)


def test_families_list_a_difference_from_llama(made: ModuleType, measured: Any) -> None:
    for name, cases in made.cases_by_class(measured["cases"]).items():
        assert made.words(cases), name


def test_differing_bits_make_no_row(made: ModuleType) -> None:
    case = {"class": "X", "ranks": {"equal": 0, "of": 1}}
    with pytest.raises(ValueError, match="X: ranks has other bits"):
        made._exact([case], "ranks")
