"""The operating system: processes, files, the processor, compilers, progress lines, plain HTTP.

Imports only from the base modules.
Begin with: machine.py (memory and cores).
Tests: tests/system.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.system.regular_files import read_json as read_json
    from nano_inference.system.regular_files import sync as sync

_MODULES = {
    "read_json": "regular_files",
    "sync": "regular_files",
}
__getattr__ = lazy(__name__, _MODULES)
