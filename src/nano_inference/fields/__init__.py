"""Declared and checked fields of dataclasses: options of commands and configurations.

Imports only from the base modules.
Begin with: options.py.
Tests: tests/test_config.py.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.fields.options import check_least as check_least
    from nano_inference.fields.options import check_seconds as check_seconds
    from nano_inference.fields.options import is_whole as is_whole
    from nano_inference.fields.options import option as option
    from nano_inference.fields.options import strict_options as strict_options

_MODULES = {
    "check_least": "options",
    "check_seconds": "options",
    "is_whole": "options",
    "option": "options",
    "strict_options": "options",
}
__getattr__ = lazy(__name__, _MODULES)
