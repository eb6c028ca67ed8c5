"""Where files are kept that can be made again: kernels, converted models. The one place that asks
the environment.
"""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`nano-inference/NAME` in `$XDG_CACHE_HOME`, or in `~/.cache` where that is not set or no
    absolute path.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "nano-inference" / name
