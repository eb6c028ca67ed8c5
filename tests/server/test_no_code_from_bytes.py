"""No received bytes are executed: no module that can receive bytes uses pickle or the like."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nano_inference

SOURCES = Path(nano_inference.__file__).parent
FOLDERS = ("server", "remote", "fleet", "weights", "parallel", "system", "data", "text", "cli")
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "multiprocessing",
}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {("torch", "load"), ("yaml", "load"), ("jsonpickle", "decode")}
ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized"}


def offences(source: str) -> list[str]:
    results: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                results += [each.name for each in names if each.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                results += [module] if module.split(".")[0] in MODULES else []
                results += [
                    f"{module}.{each.name}" for each in names if (module, each.name) in METHODS
                ]
            case ast.Call(func=ast.Name(name)) if name in CALLS:
                results.append(name)
            case ast.Attribute(value=ast.Name(owner), attr=name) if (owner, name) in METHODS:
                results.append(f"{owner}.{name}")
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                results.append(name)
            case _:
                pass
    return results


@pytest.mark.parametrize("folder", FOLDERS)
def test_scanned_folder_exists(folder: str) -> None:
    assert any((SOURCES / folder).rglob("*.py"))


FILES = sorted(path for folder in FOLDERS for path in (SOURCES / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_bytes_are_never_run(path: Path) -> None:
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "socket.recv_pyobj()",
        "eval('1')",
        "def f():\n  import marshal",
    ],
)
def test_scan_finds(source: str) -> None:
    assert offences(source)


@pytest.mark.thorough
def test_api_process_knows_no_torch() -> None:
    source = (
        "import sys, nano_inference.server.main\nprint([m for m in ('torch', "
        "'transformers') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "[]"
