"""The command line: `nano-inference`, or `python -m nano_inference`.

Imports only from: everything in the package, torch only inside functions. Packages that add
commands import the names below.
Begin with: main.py, the table of commands.
Tests: tests/cli.
"""

from typing import TYPE_CHECKING

from nano_inference.cli.main import app as app
from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.cli.field_options import FieldOptions as FieldOptions
    from nano_inference.cli.field_options import Values as Values
    from nano_inference.cli.options import ONE_ENGINE as ONE_ENGINE
    from nano_inference.cli.options import RANKS as RANKS
    from nano_inference.cli.options import ApiKey as ApiKey
    from nano_inference.cli.options import ApiKeyFile as ApiKeyFile
    from nano_inference.cli.options import Debug as Debug
    from nano_inference.cli.options import OneModel as OneModel
    from nano_inference.cli.options import ServedModel as ServedModel
    from nano_inference.cli.options import Verbose as Verbose
    from nano_inference.cli.options import first_given as first_given
    from nano_inference.cli.options import from_fields as from_fields
    from nano_inference.cli.options import key_of as key_of
    from nano_inference.cli.options import read_keys as read_keys
    from nano_inference.cli.options import require_packages as require_packages
    from nano_inference.cli.terminal import errors as errors
    from nano_inference.cli.terminal import output as output
    from nano_inference.cli.terminal import write_file as write_file

_MODULES = {
    "ApiKey": "options",
    "ApiKeyFile": "options",
    "Debug": "options",
    "FieldOptions": "field_options",
    "ONE_ENGINE": "options",
    "OneModel": "options",
    "RANKS": "options",
    "ServedModel": "options",
    "Values": "field_options",
    "Verbose": "options",
    "errors": "terminal",
    "first_given": "options",
    "from_fields": "options",
    "key_of": "options",
    "output": "terminal",
    "read_keys": "options",
    "require_packages": "options",
    "write_file": "terminal",
}
__getattr__ = lazy(__name__, _MODULES)
