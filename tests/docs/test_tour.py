"""docs/tour.md quotes the source, and the change of docs/first-change.md applies to it."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nano_inference.sampling import filters

ROOT = Path(__file__).parents[2]
# a file's link, or an excerpt
PARTS = re.compile(r"\]\(\.\./(src/[\w/]+\.\w+)\)|^```(py|diff)\n(.*?)^```", re.M | re.S)


def excerpts(page: str, language: str) -> list[tuple[str, str]]:
    """Return the file and text of each excerpt. Its file is the last one linked before it."""
    pairs: list[tuple[str, str]] = []
    path = ""
    for part in PARTS.finditer((ROOT / "docs" / page).read_text()):
        path = part[1] or path
        if part[2] == language:
            pairs.append((path, part[3]))
    return pairs


def bare(text: str) -> str:
    """Return code without comments and without spaces, which a formatter may change."""
    return "".join(re.sub(r"(^|\s+)# .*", "", line) for line in text.splitlines()).replace(" ", "")


@pytest.mark.parametrize(("path", "excerpt"), excerpts("tour.md", "py"))
def test_tour_quotes_the_source(path: str, excerpt: str) -> None:
    source, at = bare((ROOT / path).read_text()), 0
    for passage in re.split(r"^\s*\.\.\.$", excerpt, flags=re.M):
        start = source.find(bare(passage), at)
        assert start >= 0, f"{path} does not contain, in this order:\n{passage}"
        at = start + len(bare(passage))


def test_first_change_applies_and_passes_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = excerpts("first-change.md", "diff")
    assert len({path for path, _ in changes}) == 3
    sources = {path: (ROOT / path).read_text() for path, _ in changes}
    for path, hunk in changes:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert sources[path].count(old) == 1, f"{path} does not contain once:\n{old}"
        sources[path] = sources[path].replace(old, new)
    for path, source in sources.items():
        assert "top_a" in source
        if path.endswith(".py"):
            compile(source, path, "exec")
    changed = ModuleType(filters.__name__)
    monkeypatch.setitem(sys.modules, filters.__name__, changed)
    exec(sources["src/nano_inference/sampling/filters.py"], changed.__dict__)
    ((_, test),) = excerpts("first-change.md", "py")
    namespace: dict[str, Any] = {}
    exec(test, namespace)
    namespace["test_top_a_keeps_tokens_by_the_square_of_the_first"]()
