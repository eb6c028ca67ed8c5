"""The listening sockets of a server, and a thread that says "starting" on them while the server's
modules are still being imported.
"""

import errno
import json
import selectors
import socket
import threading
from contextlib import suppress
from typing import Any

from nano_inference.errors import ConfigError
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, openai_error

# Monitoring uses these, also before the server is ready and when it is overloaded.
HEALTH = frozenset(("/health", "/ping"))

_BACKLOG = 2048  # connections that wait; uvicorn's own number
_PATIENCE = 0.2  # seconds for a client to send its request, and to read the reply
_LARGEST_HEAD = 65_536  # bytes


class Door:
    """Sockets that listen from birth. A thread answers each request with 503 until `hand_over`
    returns the sockets. Connections that it has not accepted wait for the server.

    A Unix socket, TLS and port 0 have no door: the server listens itself, as it does if the host
    is wrong.

    Raises `ConfigError` if the port is in use, or needs privileges that this process lacks.
    """

    def __init__(self, config: ServerConfig) -> None:
        without = config.uds is not None or config.tls_cert is not None or config.port == 0
        self._sockets = [] if without else _listening(config.host, config.port)
        self._end, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="nano-inference door", daemon=True)
        self._thread.start()

    def hand_over(self) -> list[socket.socket]:
        """Stop answering and return the listening sockets, one for each address of the host."""
        self._wake.close()
        self._thread.join()
        self._end.close()
        return self._sockets

    def close(self) -> None:
        """Stop answering and stop listening."""
        for one in self.hand_over():
            one.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for one in (*self._sockets, self._end):
                selector.register(one, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._end in ready:
                    return
                for one in ready:
                    assert isinstance(one, socket.socket)
                    with suppress(OSError):  # the client has gone
                        client, _ = one.accept()
                        with client:
                            _answer(client)


def _listening(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of a host. Empty: this host has none here."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
            one.listen(_BACKLOG)
            one.setblocking(False)
    except (OSError, UnicodeError) as problem:
        for one in sockets:
            one.close()
        if getattr(problem, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(why_not(host, port, problem)) from problem
        return []
    return sockets


def _answer(client: socket.socket) -> None:
    """Answer a request with 503. A client that sends no whole head in time gets no answer."""
    client.settimeout(_PATIENCE)
    head = b""
    while b"\r\n\r\n" not in head:
        part = client.recv(_LARGEST_HEAD)
        head += part
        if not part or len(head) > _LARGEST_HEAD:
            return
    method, _, rest = head.partition(b" ")
    target = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
    client.sendall(_reply(target, with_body=method != b"HEAD"))
    # a connection closed with unread bytes would be reset, and the reply lost
    client.shutdown(socket.SHUT_WR)
    while client.recv(_LARGEST_HEAD):
        pass


def _reply(target: str, *, with_body: bool) -> bytes:
    said: dict[str, Any] = {"status": "starting", "model_loaded": False}
    if target not in HEALTH:
        said = openai_error(ApiError(503, "the engine is being built.", code="starting"))
    body = json.dumps(said, separators=(",", ":")).encode()
    lines = (
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "retry-after: 1",
        "connection: close",
        "\r\n",
    )
    return "\r\n".join(lines).encode() + (body if with_body else b"")


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
