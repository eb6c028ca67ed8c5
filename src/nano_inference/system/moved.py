"""Errors for old names: importing a moved module or reading a removed attribute reports the new
name.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NoReturn

MOVED = {
    "nano_inference.bench": "nano_bench",
    "nano_inference.engine.transports": "nano_inference.weights.transports",
    "nano_inference.engine.weights": "nano_inference.weights",
    "nano_inference.engine.workers": "nano_inference.ranks",
    "nano_inference.ray": "nano_ray",
    "nano_inference.rl.verl": "nano_ray.verl",
    "nano_inference.scheduling": "nano_inference.core",
    "nano_inference.serving": "nano_inference.server",
    "nano_inference.speculation": "nano_inference.drafts",
    "nano_inference.training_service": "nano_training_service",
}


class Removed:
    """Descriptor for a removed attribute. Reading it raises an `AttributeError` that names the
    replacement.

    Unlike a `__getattr__` of the class, the descriptor slows down no other attribute.

    Args:
        message: Removed name and its replacement.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._message)


def moved_names(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a `__getattr__` for a module that some names have moved out of.

    Args:
        module: Name of the module.
        names: New module by name. Importing such a name raises an `ImportError` with its new
            module.
    """

    def look(name: str) -> NoReturn:
        if name in names:
            raise ImportError(f"{name} has moved; import it from {names[name]}.")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look


class Moved:
    """Last finder in `sys.meta_path`. It finds no module and only reports moved ones."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Raise `ModuleNotFoundError` with the new name if a module has moved."""
        if name in MOVED:
            raise ModuleNotFoundError(f"{name} has moved; import {MOVED[name]}.", name=name)


def report_moves() -> None:
    """Install the finder, at most once."""
    if Moved not in sys.meta_path:
        sys.meta_path.append(Moved)
