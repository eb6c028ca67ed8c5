"""The public engine: intake, threads and lifecycle, delivery, weight updates, adapters, scoring.

Imports only from: checkpoints, core, data, device, drafts, kv_cache, models, ops, ranks, sampling,
structured, text, weights.
Begin with: engine.py, then shared_loop.py.
Tests: tests/engine.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.engine.requests import checked_ids as checked_ids
    from nano_inference.engine.requests import is_text as is_text
    from nano_inference.engine.requests import many_prompts as many_prompts
    from nano_inference.engine.requests import params_for as params_for

_MODULES = {
    "checked_ids": "requests",
    "is_text": "requests",
    "many_prompts": "requests",
    "params_for": "requests",
}
__getattr__ = lazy(__name__, _MODULES)
