"""Why a server cannot listen where it should, in one sentence, before anything is loaded."""

import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from nano_inference.errors import ConfigError

_UVICORN = logging.getLogger("uvicorn.error")


def require_free(host: str, port: int) -> None:
    """Raise `ConfigError` if the port is in use, or needs rights that this process lacks. Any other
    problem is left to the server, which knows all addresses of the host. Port 0 is any free one.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as problem:
            if problem.errno in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(why_not(host, port, problem)) from problem


def why_not(host: str, port: int, problem: BaseException | None) -> str:
    """Why nothing can listen at this address, and what helps."""
    code = getattr(problem, "errno", None)
    if code == errno.EADDRINUSE:
        return f"port {port} is in use; --port 0 takes a free one."
    if code == errno.EACCES:
        return f"port {port} needs administrator rights; use one above 1023, or --port 0."
    text = getattr(problem, "strerror", None) or problem
    why = "" if problem is None or isinstance(problem, SystemExit) else f": {text}"
    return f"host={host!r}, port={port}: cannot listen there{why}."


class _Kept(logging.Filter):
    """Holds back the error that uvicorn logs when it cannot listen."""

    def __init__(self) -> None:
        super().__init__()
        self.problem: OSError | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if isinstance(record.msg, OSError):
            self.problem = record.msg
            return False
        return True


@contextmanager
def held_back() -> Iterator[_Kept]:
    """While uvicorn starts to listen: its own error line is kept, not logged."""
    kept = _Kept()
    _UVICORN.addFilter(kept)
    try:
        yield kept
    finally:
        _UVICORN.removeFilter(kept)
