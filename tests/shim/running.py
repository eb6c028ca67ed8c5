"""Runs scripts with the package `vllm` of shim/."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "shim" / "src"


def with_shim() -> dict[str, str]:
    """Return an environment in which `vllm` is the package of shim/."""
    paths = [SHIM, ROOT / "src", ROOT]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def script(path: Path, *arguments: object) -> "Iterator[subprocess.Popen[str]]":
    """Run a script, and kill it at the end."""
    command = [sys.executable, path, *map(str, arguments)]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=with_shim(), text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()
