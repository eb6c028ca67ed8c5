"""Engine over several processes: rank 0 runs the scheduler, other ranks run the same steps on their
parts.

Needs msgspec: `pip install 'nano-inference[parallel]'`.

Imports only from: checkpoints, core, device, drafts, kv_cache, models, ops, parallel, sampling,
weights.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.ranks.launcher import Handle, Launcher, LocalLauncher
    from nano_inference.ranks.messages import Begin as Begin
    from nano_inference.ranks.torchrun import TorchrunLauncher, serve_rank
    from nano_inference.ranks.worker import run_worker as run_worker

__all__ = ["Handle", "Launcher", "LocalLauncher", "TorchrunLauncher", "serve_rank"]

# lazy, because these modules import torch, which a worker does late
_MODULES = {
    "Begin": "messages",
    "Handle": "launcher",
    "Launcher": "launcher",
    "LocalLauncher": "launcher",
    "TorchrunLauncher": "torchrun",
    "run_worker": "worker",
    "serve_rank": "torchrun",
}
__getattr__ = lazy(__name__, _MODULES)
