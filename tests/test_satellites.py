"""Satellites import only public names of the engine, and the load generator imports no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"
SATELLITES = ("nano_bench", "nano_ray", "nano_train", "nano_training_service")
FILES = sorted(path for name in SATELLITES for path in (SOURCES / name).rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Return each engine module that a file imports from, with the name, or no name for the module
    itself.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, each.name) for each in node.names)


def is_public(module: str) -> bool:
    """Return True for the package, a folder, or a top-level module."""
    *parents, name = module.split(".")
    folder = SOURCES.joinpath(*parents)
    return (folder / name / "__init__.py").exists() or parents == ["nano_inference"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_satellite_imports_only_public_names(path: Path) -> None:
    for module, name in imports_of(path):
        if module.split(".")[0] != "nano_inference":
            continue
        assert is_public(module), f"{module} is a file of a folder; import from the folder"
        assert not any(part.startswith("_") for part in (*module.split("."), name))
        if name:
            assert not (SOURCES.joinpath(*module.split(".")) / f"{name}.py").exists(), (
                f"{module}.{name} is a file of a folder; import the names that you need"
            )
            assert hasattr(import_module(module), name), f"{module} has no {name}"


def test_is_public_distinguishes_folders_from_files() -> None:
    for module in ("nano_inference", "nano_inference.errors", "nano_inference.server.http"):
        assert is_public(module)
    for module in ("nano_inference.server.config", "nano_inference.weights.transports.wire"):
        assert not is_public(module)


@pytest.mark.parametrize("name", ["load", "wire", "shape"])
def test_load_generator_imports_no_torch(name: str) -> None:
    code = f"import nano_bench.{name}, sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert done.returncode == 0
