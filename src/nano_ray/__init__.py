"""Replicas on Ray: `RayFleet` for RL, and `nano-inference serve --ray`.

Ray places the processes, replaces dead ones, and moves objects between nodes. Engines exchange the
same messages as on one machine and treat requests alike. Install with `pip install
'nano-inference[ray]'`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nano_ray.fleet import RayFleet, Replica

__all__ = ["RayFleet", "Replica"]


def __getattr__(name: str) -> Any:
    """Import Ray on the first access to a fleet class."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("ray")
    except ModuleNotFoundError as problem:
        raise ModuleNotFoundError(
            "nano_ray requires Ray, which is not installed; run: pip install 'nano-inference[ray]'"
        ) from problem
    return getattr(import_module("nano_ray.fleet"), name)
