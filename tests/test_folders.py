"""Each folder's `__init__` lists exactly the folders that it imports from."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "nano_inference"
BASE = {"errors", "types", "config", "features", "fields", "arrays", "system"}
FOLDERS = sorted(
    init.parent for init in PACKAGE.glob("*/__init__.py") if init.parent.name not in {"cli"}
)


def imported(folder: Path) -> set[str]:
    """Return the folders that a folder's files import from, except base modules."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
            elif isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
    inside = (name.split(".") for name in names if name.startswith("nano_inference."))
    return {parts[1] for parts in inside} - BASE - {folder.name}


def sentence(folders: set[str]) -> str:
    named = f": {', '.join(sorted(folders))}." if folders else " the base modules."
    return f"Imports only from{named}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_init_names_the_folders_that_it_imports(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    said = re.search(r"^Imports only from.*?\.$", text, re.MULTILINE | re.DOTALL)
    expected = sentence(imported(folder))
    assert said is not None, f"write: {expected}"
    assert " ".join(said.group().split()) == expected, "\n".join(textwrap.wrap(expected, 100))


@pytest.mark.parametrize(
    "init",
    sorted(PACKAGE.rglob("__init__.py")),
    ids=lambda init: str(init.parent.relative_to(PACKAGE)),
)
def test_init_docstring_starts_with_existing_files(init: Path) -> None:
    text = ast.get_docstring(ast.parse(init.read_text())) or ""
    said = re.search(r"^Begin with: (.*?)\.$", text, re.MULTILINE | re.DOTALL)
    named = re.findall(r"[\w/]+\.py", said.group(1)) if said else []
    assert not [name for name in named if not (init.parent / name).exists()]
