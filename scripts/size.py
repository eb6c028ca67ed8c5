"""How large the package is, and how many of its files a token, a request and an update pass.

`python scripts/size.py` counts; `python scripts/size.py --paths` also runs each of these once on a
small model and lists the files. Numbers that may only fall: docs/house.md says where they stand.

Statements are those of the syntax tree, docstrings aside: no way of formatting changes them.
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

PACKAGE = Path(__file__).parents[1] / "src" / "nano_inference"
# A model, a cache, a sampler and a loop in one process: what a reader must know to know the engine.
HEART = (
    "scheduling/*.py",
    "kv_cache/*.py",
    "sampling/*.py",
    "ops/interface.py",
    "ops/reference/*.py",
    "models/decoder.py",
    "models/blocks/*.py",
    "batch.py",
    "engine/engine.py",
    "core/loop.py",
    "engine/requests.py",
    "device/runner.py",
    "types.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--paths", action="store_true", help="also run, and list the files passed")
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
    for name, files in found.get("files passed", {}).items():
        engine = [each for each in files if not each.startswith("serving/")]
        print(f"{len(files):7,}  files passed by {name}; {len(engine)} outside serving/")
        print("         " + ", ".join(files))


def sizes() -> dict[str, Any]:
    """Statements, classes, files and lines of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    statements = {path: _count(tree) for path, tree in trees.items()}
    folders: Counter[str] = Counter()
    for path, count in statements.items():
        folders[str(path.relative_to(PACKAGE).parent)] += count
    texts = {path: path.read_text().splitlines() for path in files}
    heart = {path for pattern in HEART for path in PACKAGE.glob(pattern)}
    return {
        "statements": sum(statements.values()),
        "classes": sum(
            isinstance(n, ast.ClassDef) for tree in trees.values() for n in ast.walk(tree)
        ),
        "files": len(files),
        "lines": sum(map(len, texts.values())),
        "lines of the heart": sum(len(texts[path]) for path in heart),
        "columns of the longest line": max(len(line) for text in texts.values() for line in text),
        "statements by folder": dict(folders.most_common()),
    }


def _count(tree: ast.Module) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(tree))


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


class Trace:
    """Which of the package's files have a function that runs while `watching`, on any thread."""

    def __init__(self) -> None:
        self._files: set[str] | None = None
        threading.setprofile(self._look)  # threads that start from now on
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
    """The files that each way passes, each run a second time: the first also loads and fills."""
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
