"""Lazy imports of the public names of a folder."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a folder's `__init__`.

    Args:
        package: Dotted name of the folder.
        modules: Public names, and the modules in the folder that define them. No module may have
            the name of an object in it, because its import would replace the object by the module.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
