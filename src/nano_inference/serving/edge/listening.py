"""What a listening server needs of its system: descriptors for its connections, and a socket file
that is its own.
"""

import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("nano_inference.serving")

_OTHERS = 256  # descriptors beside those of connections


def raise_file_limit(connections: int) -> None:
    """Let this process open so many connections, as far as its user may; says so where that is not
    far enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHERS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.info(
            "max_connections=%d, but the system allows %d open files; see ulimit -n.",
            connections,
            most,
        )


@contextmanager
def socket_for_its_user(path: str | None) -> Iterator[None]:
    """While uvicorn makes the socket file at `path`: its user's alone, unless an old one is there,
    whose mode stays.

    Raises `OSError` where another server listens, or where something else lies.
    """
    if path is None:
        yield
        return
    if not Path(path).exists():
        with socket.socket(
            socket.AF_UNIX
        ) as mine:  # uvicorn keeps the mode of what is there, and opens a new one to all
            before = os.umask(0o177)
            try:
                mine.bind(path)
            finally:
                os.umask(before)
    elif not Path(path).is_socket():
        raise FileExistsError("a file that is no socket is there")
    elif _is_heard(path):
        raise FileExistsError("another server listens there")
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _is_heard(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        return True
