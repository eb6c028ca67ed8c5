"""Functions that run.toml names: Python that you wrote, run in this process with your rights.

Nothing here is for code from outside: a run of someone else executes the files that it names.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nano_inference.errors import ConfigError, one_line


def is_file(spec: str) -> bool:
    """Return True if a name in run.toml is a file, or a function of a file."""
    return spec.partition(":")[0].endswith((".py", ".jsonl"))


def local_file(spec: str, folder: Path) -> Path:
    """Return the path of a named file. Raises `ConfigError` if `folder` does not contain it."""
    name = spec.partition(":")[0]
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{spec}: {name} is outside {folder}; put it next to run.toml.")
    if not path.is_file():
        raise ConfigError(f"{spec}: {path} does not exist; name a file next to run.toml.")
    return path


def load_function(spec: str, folder: Path) -> Callable[..., Any]:
    """Return the function that `file.py:function` or `package.module:function` names.

    Raises `ConfigError` if file, module or function is missing, or if importing it fails.
    """
    source, _, name = spec.partition(":")
    if not source or not name:
        raise ConfigError(f"{spec!r} must be FILE.py:FUNCTION or MODULE:FUNCTION.")
    try:
        module = _module_of_file(local_file(spec, folder)) if is_file(spec) else None
        module = module or importlib.import_module(source)
    except ConfigError:
        raise
    except Exception as problem:
        raise ConfigError(f"{spec}: {source} cannot be imported: {one_line(problem)}.") from problem
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{spec}: {source} has no function {name!r}; check the name.")
    return function


def _module_of_file(path: Path) -> Any:
    text = path.read_bytes()
    # dataclasses look their module up by name
    name = f"nano_train_code_{hashlib.sha256(str(path.resolve()).encode() + text).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
