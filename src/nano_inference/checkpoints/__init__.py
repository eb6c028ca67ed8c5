"""Model files: folders, safetensors, quantized formats, GGUF, adapters.

Imports only from: models, ops, parallel.
Begin with: loading.py.
Tests: tests/checkpoints.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.checkpoints.lora import targets_of as targets_of
    from nano_inference.checkpoints.shard_checks import require_shardable as require_shardable

_MODULES = {
    "require_shardable": "shard_checks",
    "targets_of": "lora",
}
__getattr__ = lazy(__name__, _MODULES)
