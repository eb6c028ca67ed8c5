"""Early check that the server can listen, with a one-sentence reason if not."""

import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from nano_inference.errors import ConfigError

_UVICORN = logging.getLogger("uvicorn.error")


def require_free(host: str, port: int) -> None:
    """Raise `ConfigError` if the port is in use, or needs privileges that this process lacks.

    The server itself reports other problems, since it tries all addresses of the host. Port 0 is
    any free port.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as problem:
            if problem.errno in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(why_not(host, port, problem)) from problem


def why_not(host: str, port: int, problem: BaseException | None) -> str:
    """Return why nothing can listen at this address, and a remedy."""
    code = getattr(problem, "errno", None)
    if code == errno.EADDRINUSE:
        return f"port {port} is in use; --port 0 takes a free one."
    if code == errno.EACCES:
        return f"port {port} needs administrator rights; use one above 1023, or --port 0."
    text = getattr(problem, "strerror", None) or problem
    why = "" if problem is None or isinstance(problem, SystemExit) else f": {text}"
    return f"cannot listen on host={host!r}, port={port}{why}."


class _Kept(logging.Filter):
    """Filter that keeps the error uvicorn logs when it cannot listen."""

    def __init__(self) -> None:
        super().__init__()
        self.problem: OSError | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record should be logged."""
        if isinstance(record.msg, OSError):
            self.problem = record.msg
            return False
        return True


@contextmanager
def held_back() -> Iterator[_Kept]:
    """Keep uvicorn's own error line instead of logging it, while uvicorn starts to listen."""
    kept = _Kept()
    _UVICORN.addFilter(kept)
    try:
        yield kept
    finally:
        _UVICORN.removeFilter(kept)
