"""Measure the size of the package, and the files that a token, a request and an update pass.

`python scripts/size.py` counts. `python scripts/size.py --paths` also runs each of these once on a
small model and lists the files. The numbers may only fall; docs/house.md has the current ones.

Statements are nodes of the syntax tree without docstrings, so formatting does not change them.
"""

import argparse
import ast
import base64
import json
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "nano_inference"
# folders with everything that a step needs
STEP = ("core", "kv_cache", "sampling")
SCREEN = 50  # lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--paths", action="store_true", help="also run each path and list its files"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found: dict[str, Any] = sizes()
    if options.paths:
        found["files passed"] = {name: sorted(files) for name, files in paths().items()}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        if isinstance(value, int):
            print(f"{value:7,}  {name}")
    for name, count in found["statements by folder"].items():
        print(f"{count:11,}  {name}")
    for circle in found["files of each circle"]:
        print(f"{len(circle):7,}  files import each other: " + ", ".join(circle))
    for name, files in found.get("files passed", {}).items():
        engine = [each for each in files if not each.startswith("server/")]
        print(f"{len(files):7,}  files passed by {name}; {len(engine)} outside server/")
        print("         " + ", ".join(files))


def sizes() -> dict[str, Any]:
    """Count statements, classes, files and lines of the package and its satellites."""
    files = sorted(PACKAGE.parent.rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    statements = {path: _count(tree) for path, tree in trees.items()}
    folders: Counter[str] = Counter()
    for path, count in statements.items():
        folders[_folder(path)] += count
    texts = {path: path.read_text().splitlines() for path in files}
    long = [path for path, tree in trees.items() for node in ast.walk(tree) if _is_long(node)]
    return {
        "statements": sum(statements.values()),
        "statements of core, kv_cache and sampling": sum(folders[name] for name in STEP),
        "statements of core": folders["core"],
        "classes": sum(
            isinstance(n, ast.ClassDef) for tree in trees.values() for n in ast.walk(tree)
        ),
        "files": len(files),
        "files of engine": sum(_folder(path) == "engine" for path in files),
        "loose files of the package": len(list(PACKAGE.glob("*.py"))),
        "lines": sum(map(len, texts.values())),
        "lines of the largest file": max(map(len, texts.values())),
        "files over 500 lines": sum(len(text) > 500 for text in texts.values()),
        "functions over 50 lines": len(long),
        "functions over 50 lines in core": sum(_folder(path) == "core" for path in long),
        "circles of files": len(loops := circles(trees)),
        "lines of tests": sum(
            len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")
        ),
        "columns of the longest line": max(len(line) for text in texts.values() for line in text),
        "statements by folder": dict(folders.most_common()),
        "files of each circle": [sorted(circle) for circle in loops],
    }


def _folder(path: Path) -> str:
    inside = path.is_relative_to(PACKAGE)
    return str(path.relative_to(PACKAGE if inside else PACKAGE.parent).parent)


def _is_long(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
        return False
    return node.end_lineno - node.lineno + 1 > SCREEN


def circles(trees: dict[Path, ast.Module]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or through others."""
    modules = {_module(path): path for path in trees}
    imports = {name: _imports(name, trees[path], modules) for name, path in modules.items()}
    reached = {name: _reached(name, imports) for name in imports}
    found: list[set[str]] = []
    for name in imports:
        circle = {other for other in reached[name] if name in reached[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, tree: ast.Module, modules: dict[str, Path]) -> set[str]:
    """Return the modules that a file imports, resolving names that an `__init__` lists."""
    if modules[name].name == "__init__.py":
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found & set(modules)


def _reached(name: str, imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [name]
    while todo:
        for other in imports[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def _count(tree: ast.Module) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(tree))


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


class Trace:
    """Collect the package's files that have a function running in the block, on any thread."""

    def __init__(self) -> None:
        self._files: set[str] | None = None
        threading.setprofile(self._look)  # threads that start later
        sys.setprofile(self._look)

    @contextmanager
    def watching(self) -> Iterator[set[str]]:
        self._files = files = set()
        yield files
        self._files = None

    def _look(self, frame: FrameType, event: str, _argument: object) -> None:
        path = frame.f_code.co_filename
        if self._files is not None and event == "call" and path.startswith(str(PACKAGE)):
            self._files.add(str(Path(path).relative_to(PACKAGE)))


def paths() -> dict[str, set[str]]:
    """Return the files of each path in its second run. The first run loads and fills caches."""
    trace = Trace()
    import torch

    from nano_inference import EngineConfig, InferenceEngine, SamplingParams
    from nano_inference.server.config import ServerConfig
    from nano_inference.server.main import running_server

    found: dict[str, set[str]] = {}
    config = EngineConfig("smollm2-135m", quantization=None, max_model_len=256, max_batch_size=4)
    norm = {"model.norm.weight": torch.ones(576)}
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1)
    with InferenceEngine(config) as engine:
        for _ in range(2):
            with trace.watching() as found["a request (add_request)"]:
                engine.add_request([1, 2, 3], params)
            for _ in range(4):
                with trace.watching() as found["a token (a step that decodes)"]:
                    engine.step()
            with trace.watching() as found["an update of one tensor (update_weights)"]:
                engine.update_weights(norm)
            while engine.has_pending():
                engine.step()
    chat = {
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 4,
        "model": "smollm2-135m",
    }
    serving = ServerConfig(port=0, in_process=True, rl=True)
    tensor = {"serialized_named_tensors": [_base64_of(norm)], "load_format": "auto"}
    with running_server(config, serving) as url:
        for _ in range(2):
            with trace.watching() as found["a chat through the server"]:
                _post(f"{url}/v1/chat/completions", chat)
            with trace.watching() as found["one tensor by SGLang's route"]:
                _post(f"{url}/update_weights_from_tensor", tensor)
    return found


def _base64_of(tensors: dict[str, Any]) -> str:
    from safetensors.torch import save

    return base64.b64encode(save(tensors)).decode()


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


if __name__ == "__main__":
    main()
