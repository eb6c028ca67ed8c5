"""The command line: `nano-inference generate`, `chat`, `info`, `replay`.

What imports torch is imported inside the commands.
"""

from nano_inference.cli.main import app

__all__ = ["app"]
