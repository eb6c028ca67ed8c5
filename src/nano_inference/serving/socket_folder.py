"""The private folder of an engine's two sockets. Folders left by killed processes are removed."""

import os
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "nano-inference-"
MAX_ADDRESS = 100  # bytes of a socket's path; the system's limit is a little more
OLD = 60.0  # seconds; a live process listens in its folder long before


def private_folder() -> Path:
    """A fresh folder that is ours alone, with a path short enough for a socket."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
    if len(os.fsencode(f"{folder}/engine")) > MAX_ADDRESS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    return folder


def remove_abandoned() -> None:
    """Remove folders of processes that were all killed at once; other ends remove their own."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        with suppress(OSError):
            for folder in list(Path(place).glob(f"{PREFIX}*")):
                if _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether it is one of ours in which no process listens. A process id would say less: it may
    belong to another container, or be used again.
    """
    try:
        found = folder.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or stat.S_IMODE(found.st_mode) != 0o700
            or found.st_uid != os.getuid()
        ):
            return False
        if time.time() - found.st_mtime < OLD:
            return False
        return all(
            each.name in ("api", "engine") and not _listens(each) for each in folder.iterdir()
        )
    except OSError:  # it has just gone
        return False


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.settimeout(0.1)
        try:
            one.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # it may listen, and have too much to do
            return True
        return True
