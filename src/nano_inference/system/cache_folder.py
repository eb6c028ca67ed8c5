"""Folder of files that can be rebuilt, such as kernels and converted models, and locks on them.
Only this module reads the environment for its path.
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
    """Return `nano-inference/NAME` in `$XDG_CACHE_HOME`, or in `~/.cache` if the variable is unset
    or not an absolute path.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "nano-inference" / name


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """Yield a new folder next to `target`, to be filled and renamed. It is removed at the end if it
    still exists. Its fresh name avoids leftovers of a killed or a concurrent attempt.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def locked(descriptor: int, patience: float) -> bool:
    """Lock an open file once no other process has it locked. Return False after `patience` seconds.
    Raises `OSError` if the file system has no locks.
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
