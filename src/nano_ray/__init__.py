"""Replicas on Ray: `RayFleet` for RL, and `nano-inference serve --ray`.

Ray places the processes, starts new ones where some have died, and moves objects between nodes;
what is said to an engine, and what becomes of its requests, is the same as on one machine. `pip
install 'nano-inference[ray]'`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nano_ray.fleet import RayFleet, Replica

__all__ = ["RayFleet", "Replica"]


def __getattr__(name: str) -> Any:
    """Ray is imported when a fleet is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("ray")
    except ModuleNotFoundError as problem:
        raise ModuleNotFoundError(
            "nano_ray needs Ray, which this installation lacks; pip install "
            "'nano-inference[ray]' brings it."
        ) from problem
    return getattr(import_module("nano_ray.fleet"), name)
