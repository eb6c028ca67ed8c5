"""Modules that have moved: an import of an old name reports the new one."""

import sys
from collections.abc import Sequence
from types import ModuleType

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


class Moved:
    """A finder that is asked last, and finds nothing."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Raise `ModuleNotFoundError` with the new name of a module that has moved."""
        if name in MOVED:
            raise ModuleNotFoundError(f"{name} has moved: import {MOVED[name]}.", name=name)


def report_moves() -> None:
    """Install the finder once."""
    if Moved not in sys.meta_path:
        sys.meta_path.append(Moved)
