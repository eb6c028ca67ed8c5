"""The command line: `nano-inference`, or `python -m nano_inference`.

What imports torch is imported inside the commands.
"""

from nano_inference.cli.main import app

__all__ = ["app"]
