"""A folder with one library and its checksum: put there whole or not at all, by one process at a
time.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "build.lock"
MANIFEST = "sha256"
# seconds that a process waits for another that builds: more than any build may take
PATIENCE = 900.0
ABANDONED = 3600.0  # seconds after which an unfinished folder is nobody's
_LOOK_AGAIN = 0.1  # seconds


def is_whole(library: Path) -> bool:
    """Whether the library is there with the bytes that its manifest tells of. It is read, not
    loaded.
    """
    try:
        return (library.parent / MANIFEST).read_text(encoding="ascii").strip() == _sha256(library)
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def put(unfinished: Path, library: str, folder: Path) -> None:
    """Write the manifest of what stands in `unfinished`, and make that `folder`, in the place of
    whatever stood there.

    All is on the disk before it has its name: a machine that loses its power has the old folder or
    the new one.
    """
    (unfinished / MANIFEST).write_text(_sha256(unfinished / library) + "\n", encoding="ascii")
    for path in (unfinished / library, unfinished / MANIFEST, unfinished):
        _sync(path)
    if folder.exists():
        old = unfinished.with_name(f"{unfinished.name}.old")
        folder.rename(old)  # who has loaded it keeps it
        unfinished.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        unfinished.rename(folder)
    _sync(folder.parent)


@contextmanager
def alone(root: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Be the only process that builds in this folder. The lock ends with its process, however that
    ends.

    A file system without locks has none: there several may build, each in a folder of its own.

    Raises:
        TimeoutError: another process has built for longer than `patience` seconds.
    """
    deadline = time.monotonic() + patience
    with (root / LOCK).open("a", encoding="ascii") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {root / LOCK} for more than {patience:g} s; "
                        "end that process."
                    ) from None
                time.sleep(_LOOK_AGAIN)
                continue
            except OSError:
                pass
            break
        yield  # closing the file lets go


def clean(root: Path, prefixes: tuple[str, ...]) -> None:
    """Remove what builds that were killed have left: old folders of such names."""
    for path in root.iterdir():
        with suppress(OSError):  # another process was first
            if (
                path.name.startswith(prefixes)
                and path.is_dir()
                and time.time() - path.stat().st_mtime > ABANDONED
            ):
                shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
