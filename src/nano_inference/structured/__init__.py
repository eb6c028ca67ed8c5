"""Structured output: grammars and the masks of tokens that they allow next. No torch.

Imports only from the base modules.
Begin with: grammar.py, then backend.py.
Tests: tests/structured.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.structured.backend import backend_named as backend_named

_MODULES = {
    "backend_named": "backend",
}
__getattr__ = lazy(__name__, _MODULES)
