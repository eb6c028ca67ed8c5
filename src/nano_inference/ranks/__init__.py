"""One engine over several processes: rank 0 has the scheduler, the others run the same steps on
their parts.

It needs msgspec: `pip install 'nano-inference[parallel]'`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nano_inference.ranks.launcher import Handle, Launcher, LocalLauncher
    from nano_inference.ranks.torchrun import TorchrunLauncher, serve_rank

__all__ = ["Handle", "Launcher", "LocalLauncher", "TorchrunLauncher", "serve_rank"]

_WHERE = {"TorchrunLauncher": "torchrun", "serve_rank": "torchrun"}


# what is imported brings in torch, which a worker wants to do late
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE.get(name, 'launcher')}"), name)
