"""Where files are kept that can be made again: kernels, converted models. The one place that asks
the environment.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`nano-inference/NAME` in `$XDG_CACHE_HOME`, or in `~/.cache` where that is not set or no
    absolute path.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "nano-inference" / name


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, to be filled and renamed; what is left of it is removed. Its
    name is fresh: no attempt meets what a killed or a concurrent one left behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
