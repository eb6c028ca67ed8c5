"""`scripts/prose.py` counts the faults that its budgets limit, and budgets only fall."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
BUDGETS = """# limits
since = "HEAD"
"words of documents" = 50
"you in documents" = 8
"semicolons in documents" = 100
"""


@pytest.fixture
def prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, on an empty repository in `tmp_path`."""
    spec = importlib.util.spec_from_file_location("prose", ROOT / "scripts" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "prose", module)
    spec.loader.exec_module(module)
    (tmp_path / "budgets.toml").write_text(BUDGETS)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "BUDGETS", tmp_path / "budgets.toml")
    return module


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def places(prose: ModuleType, measure: str) -> list[tuple[str, int]]:
    return [(place.path, place.line) for place in prose.Measures([]).places[measure]]


def test_documents_are_counted_without_code(prose: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path,
        "README.md",
        "# Title\n\nYou see what `what` means;\nwhere you go on.\n\n"
        "```python\nwhat = you; where = 1\n```\n\n| what | `you` |\n|---|---|\n",
    )
    assert places(prose, "what in documents") == [("README.md", 3), ("README.md", 10)]
    assert places(prose, "you in documents") == [("README.md", 3)] * 2
    assert places(prose, "where in documents") == [("README.md", 3)]
    assert places(prose, "semicolons in documents") == [("README.md", 3)]
    assert places(prose, "old words in documents") == [("README.md", 3)]
    assert prose.Measures([]).figures()["words of documents"] == 12


def test_long_sentences_are_measured_by_paragraph(prose: ModuleType, tmp_path: Path) -> None:
    long = " ".join(["Word"] * 28)
    write(tmp_path, "README.md", f"# {long} heading\n\nShort one here. {long} end.\n\n- {long}.\n")
    assert places(prose, "words of a long sentence in documents") == [("README.md", 3)]
    assert prose.Measures([]).lengths["documents"] == [3, 29, 28]


def test_docstrings_and_comments_are_counted(prose: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path,
        "src/a.py",
        '"""Module of things."""\n\n'
        'def f(found):\n    """What is left; told.\n\n    Args:\n        x: of the thing.\n    """\n'
        "    # of a comment\n    each = [own for own in found]\n    return each\n\n"
        'def g():\n    """Itself."""\n    raise ValueError(f"{g} is no thing")\n',
    )
    assert places(prose, "docstrings that open with a clause") == [("src/a.py", 4)]
    assert places(prose, "docstrings under three words") == [("src/a.py", 14)]
    assert places(prose, "definitions that begin with of") == [("src/a.py", 7), ("src/a.py", 9)]
    assert places(prose, "messages in old words") == [("src/a.py", 15)]
    assert places(prose, "vague local names in src") == [("src/a.py", 3), ("src/a.py", 10)]
    assert places(prose, "old words in docstrings") == [("src/a.py", 4)]


def test_names_of_tests_need_a_unit(prose: ModuleType, tmp_path: Path) -> None:
    names = ("test_what_is_left", "test_pause_waits", "test_" + "x" * 56, "test_a_pause_waits")
    write(tmp_path, "tests/test_a.py", "".join(f"def {name}():\n    pass\n" for name in names))
    assert places(prose, "test names without a unit") == [("tests/test_a.py", n) for n in (1, 7)]
    assert places(prose, "test names over 60 characters") == [("tests/test_a.py", 5)]


@pytest.mark.parametrize(
    ("subject", "is_good"),
    [
        ("server: accept more aborts", True),
        ("kv_cache, core: name blocks", True),
        ("Many requests are accepted", False),
        ("server: Accept more aborts", False),
    ],
)
def test_commit_subjects_name_an_area(prose: ModuleType, subject: str, is_good: bool) -> None:
    assert bool(prose.SUBJECT.match(subject)) is is_good


def test_freeze_lowers_budgets_and_raises_none(prose: ModuleType, tmp_path: Path) -> None:
    prose._freeze({"words of documents": 51, "you in documents": 9, "semicolons in documents": 1.5})
    lines = (tmp_path / "budgets.toml").read_text().splitlines()
    assert lines == [*BUDGETS.splitlines()[:4], '"semicolons in documents" = 1.5']
