"""Functions that run.toml names: Python that you wrote, run in this process with your rights.

Nothing here is for code from outside: a run of someone else executes the files that it names.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
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
    if path.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file; name a file that ends in .py.")
    text = path.read_bytes()
    # dataclasses look their module up by name
    name = f"nano_train_code_{hashlib.sha256(str(path.resolve()).encode() + text).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _SourceLoader(SourceFileLoader):
    """Loader without bytecode files. Python takes one for current if the text has the same size
    and second, and writing one would change the folder of a run.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file."""
        return self.source_to_code(self.get_data(self.path), self.path)
