"""The table of control routes in docs/routes.md equals the output of `docs/make_routes.py`."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_table_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_routes", DOCS / "make_routes.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    text = made.TARGET.read_text(encoding="utf-8")
    assert "| `POST /pause` |" in text
    assert made.page(text) == text, "run python docs/make_routes.py"
