"""Updates of the weights of a running engine, their sources and their transports.

Imports only from: checkpoints, core, models, ops, parallel.
Begin with: update.py (one update), staging.py (its arrival), then sync.py (order and versions).
Tests: tests/weights.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.weights.sources import BUCKET_BYTES as BUCKET_BYTES

_MODULES = {
    "BUCKET_BYTES": "sources",
}
__getattr__ = lazy(__name__, _MODULES)
