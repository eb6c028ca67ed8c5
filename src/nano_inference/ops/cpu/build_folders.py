"""Folders of built kernels: locking between processes, and removal of old folders."""

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nano_inference.system.cache_folder import locked
from nano_inference.system.progress import say
from nano_inference.system.regular_files import sync

LOCK = "build.lock"
OBJECTS = ".objects"  # suffix of folders of object files
MANIFEST = "sha256"
# seconds to wait for another process that builds: longer than any build may take
PATIENCE = 900.0
ABANDONED = 3600.0  # seconds after which an unfinished folder counts as abandoned


def is_whole(library: Path) -> bool:
    """Return True if the library exists with the bytes that its manifest records. The file is read,
    not loaded.
    """
    try:
        return (library.parent / MANIFEST).read_text(encoding="ascii").strip() == _sha256(library)
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def put(new: Path, library: str, folder: Path) -> None:
    """Write the manifest of `new`, and rename `new` to `folder`. An existing folder is replaced.

    All files are synced before the rename, so that after a power failure the machine has either the
    old or the new folder.
    """
    (new / MANIFEST).write_text(_sha256(new / library) + "\n", encoding="ascii")
    for path in (new / library, new / MANIFEST, new):
        sync(path)
    if folder.exists():
        old = new.with_name(f"{new.name}.old")
        folder.rename(old)  # processes that have loaded it keep it
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        new.rename(folder)
    sync(folder.parent)


@contextmanager
def alone(root: Path, patience: float = PATIENCE) -> Iterator[bool]:
    """Hold the lock on builds in this folder, and yield True. The operating system releases the
    lock when the process ends, even if it is killed.

    Yield False if the file system does not support locks. Several processes may then build, each in
    its own folder.

    Raises:
        TimeoutError: Another process has held the lock for longer than `patience` seconds.
    """
    with (root / LOCK).open("a", encoding="ascii") as file:
        try:
            has_lock = locked(file.fileno(), 0)
            if not has_lock:
                say("waiting for another process that compiles the CPU kernels")
                has_lock = locked(file.fileno(), patience)
        except OSError:
            yield False
            return
        if not has_lock:
            raise TimeoutError(
                f"another process has held {root / LOCK} for more than {patience:g} s; "
                "end that process."
            )
        yield True  # closing the file releases the lock


def clean(root: Path, prefixes: tuple[str, ...], *, is_alone: bool = False) -> None:
    """Remove folders that killed builds have left. Folders of objects stay for an hour, since the
    next build with the same name resumes from them.

    Args:
        root: Parent folder.
        prefixes: Prefixes of the names of the folders to remove.
        is_alone: True if no other process builds there. Then unfinished folders of any age are
            removed, otherwise only old ones.
    """
    for path in root.iterdir():
        if not path.name.startswith(prefixes) or not path.is_dir():
            continue
        may_be_used = path.name.endswith(OBJECTS) or not is_alone
        with suppress(OSError):  # another process removed it first
            if not may_be_used or time.time() - path.stat().st_mtime > ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
