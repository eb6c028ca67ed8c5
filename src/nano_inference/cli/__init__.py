"""The command line: `nano-inference`, or `python -m nano_inference`.

Imports only from: everything in the package; torch inside the commands. Other packages add commands
with these names.
Begin with: main.py, the table of commands.
Tests: tests/cli.
"""

from typing import TYPE_CHECKING

from nano_inference.cli.main import app as app
from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.cli.field_options import FieldOptions as FieldOptions
    from nano_inference.cli.options import read_keys as read_keys
    from nano_inference.cli.options import require_packages as require_packages
    from nano_inference.cli.terminal import errors as errors
    from nano_inference.cli.terminal import output as output
    from nano_inference.cli.terminal import write_file as write_file

_MODULES = {
    "FieldOptions": "field_options",
    "errors": "terminal",
    "output": "terminal",
    "read_keys": "options",
    "require_packages": "options",
    "write_file": "terminal",
}
__getattr__ = lazy(__name__, _MODULES)
