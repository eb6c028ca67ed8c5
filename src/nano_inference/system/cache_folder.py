"""Where files are kept that can be made again: kernels, converted models. The one place that asks
the environment. And how processes take turns with such files.
"""

import fcntl
import os
import shutil
import tempfile
import time
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


def locked(descriptor: int, patience: float) -> bool:
    """Take the lock of an open file, as soon as no other process has it; False: not within so many
    seconds. Raises `OSError` where there are no locks.
    """
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
