"""Folders of built kernels: how processes take turns with them, and how old ones go."""

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
OBJECTS = ".objects"  # ends the name of a folder of objects
MANIFEST = "sha256"
# seconds that a process waits for another that builds: more than any build may take
PATIENCE = 900.0
ABANDONED = 3600.0  # seconds after which an unfinished folder counts as abandoned


def is_whole(library: Path) -> bool:
    """Whether the library is there with the bytes that its manifest tells of. It is read, not
    loaded.
    """
    try:
        return (library.parent / MANIFEST).read_text(encoding="ascii").strip() == _sha256(library)
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def put(new: Path, library: str, folder: Path) -> None:
    """Write the manifest of what stands in `new`, and make that `folder`, in the place of
    whatever stood there.

    All is on the disk before it has its name: a machine that loses its power has the old folder or
    the new one.
    """
    (new / MANIFEST).write_text(_sha256(new / library) + "\n", encoding="ascii")
    for path in (new / library, new / MANIFEST, new):
        sync(path)
    if folder.exists():
        old = new.with_name(f"{new.name}.old")
        folder.rename(old)  # who has loaded it keeps it
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        new.rename(folder)
    sync(folder.parent)


@contextmanager
def alone(root: Path, patience: float = PATIENCE) -> Iterator[bool]:
    """Be the only process that builds in this folder: True. The lock ends with its process, however
    that ends.

    False: the file system has no locks. There several may build, each in a folder of its own.

    Raises:
        TimeoutError: another process has built for longer than `patience` seconds.
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
        yield True  # closing the file lets go


def clean(root: Path, prefixes: tuple[str, ...], *, is_alone: bool = False) -> None:
    """Remove what killed builds have left: folders of such names. Objects stay for an hour, since
    the next build of their kind resumes from them.

    Args:
        root: where the folders are.
        prefixes: of their names.
        is_alone: no other process builds there, so that unfinished folders of any age are left
            over. Else only old ones are.
    """
    for path in root.iterdir():
        if not path.name.startswith(prefixes) or not path.is_dir():
            continue
        may_be_used = path.name.endswith(OBJECTS) or not is_alone
        with suppress(OSError):  # another process was first
            if not may_be_used or time.time() - path.stat().st_mtime > ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
