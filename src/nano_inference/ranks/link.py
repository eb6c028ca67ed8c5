"""Links between rank 0 and the workers: length-prefixed frames over a socket. Both ends have proved
that they belong to the same engine (`rendezvous.py`).

What travels is bytes for msgspec. It is neither encrypted nor signed, as what gloo and NCCL send is
not: between machines a network of one's own is taken for granted.
"""

import contextlib
import socket
import struct
import sys
import threading
import time

from nano_inference.errors import NanoInferenceError

FRAME_BYTES = 2**29  # of a frame: masks of a whole batch over a large vocabulary, say
BUFFER_BYTES = 2**18  # read at once
NETWORK_SECONDS = 30  # after which a network that carries nothing is taken for cut

_LENGTH = struct.Struct(">I")


class LinkLost(NanoInferenceError):
    """The other end of a link is gone, or does not answer in time."""


class Link:
    """One end of a connection. One thread receives; any may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._socket = connection
        self._file = connection.makefile("rb", BUFFER_BYTES)
        self._sending = threading.Lock()
        self._closed = self._is_late = False
        self._deadline: threading.Timer | None = None

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def send(self, frame: bytes | bytearray) -> None:
        """Send a frame; returns when the system has it. Raises `LinkLost`."""
        if len(frame) > FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame):,} bytes is larger than {FRAME_BYTES:,}.")
        with self._sending:
            try:
                header = _LENGTH.pack(len(frame))
                sent = self._socket.sendmsg([header, frame])
                # the header is far smaller than what the system takes at once
                if sent < len(header) + len(frame):
                    self._socket.sendall(memoryview(frame)[sent - len(header) :])
            except (TimeoutError, BlockingIOError):
                self.close()  # half a frame was sent, maybe
                raise LinkLost("it takes no message any more") from None
            except OSError as problem:
                raise self._lost(problem) from problem

    def receive(self, most: int = FRAME_BYTES) -> bytes:
        """The next frame, of at most so many bytes. Raises `LinkLost`."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > most:
            self.close()
            raise LinkLost(f"it sent a frame of {length:,} bytes, where {most:,} are the most")
        return self._take(length)

    def close(self) -> None:
        """End it, also for a thread that waits here."""
        if not self._closed:
            self._closed = True
            self.set_deadline(None)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._file.close()

    def set_deadline(self, seconds: float | None) -> None:
        """The link ends after so many seconds, however its bytes come; None: it does not. For
        greetings.
        """
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = threading.Timer(seconds, self._end_late)
            self._deadline.daemon = True
            self._deadline.start()

    def settle(self, send_seconds: float) -> None:
        """From now on receiving waits for ever, and sending for so many seconds."""
        self.set_deadline(None)
        whole = int(send_seconds)
        limit = struct.pack("ll", whole, int((send_seconds - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_a_cut(self._socket)

    def _take(self, length: int) -> bytes:
        try:
            data = self._file.read(length)
        except (OSError, ValueError) as problem:  # a closed file
            raise self._lost(problem) from problem
        if len(data) < length:
            raise self._lost(None)
        return data

    def _end_late(self) -> None:
        self._is_late = True
        self.close()

    def _lost(self, problem: Exception | None) -> LinkLost:
        if self._is_late:
            return LinkLost("it does not answer")
        hung_up = ConnectionResetError | BrokenPipeError | ValueError | None
        return LinkLost("it hung up" if isinstance(problem, hung_up) else str(problem))


class Listener:
    """Where rank 0 waits for the others.

    Args:
        path: of a socket in a folder that is ours alone; None: `host`.
        host: the address under which the others reach this machine.
        port: 0: any free one.

    Raises `OSError` where it cannot be had.
    """

    def __init__(self, path: str | None = None, host: str | None = None, port: int = 0) -> None:
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where: str | tuple[str, int] = path
        else:
            assert host is not None
            family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            where = str(found[0]), port
        try:
            self._socket.bind(where)
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            raise
        self.address = (
            f"unix:{path}" if path is not None else f"tcp:{host}:{self._socket.getsockname()[1]}"
        )

    def accept(self, seconds: float) -> Link | None:
        """Who connects next; None: none came within so many seconds."""
        self._socket.settimeout(max(seconds, 0.001))
        try:
            return Link(self._socket.accept()[0])
        except TimeoutError:
            return None

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def connect(address: str, seconds: float) -> Link:
    """A link to where rank 0 listens. Raises `LinkLost`."""
    kind, _, where = address.partition(":")
    end = time.monotonic() + seconds
    while True:
        left = max(end - time.monotonic(), 0.001)
        try:
            return Link(_connected(where, left) if kind == "unix" else _connected_tcp(where, left))
        except OSError as problem:
            if time.monotonic() > end:
                raise LinkLost(f"rank 0 is not to be reached at {address}: {problem}") from problem
            time.sleep(0.05)


def _connected(path: str, seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _connected_tcp(where: str, seconds: float) -> socket.socket:
    host, _, port = where.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=seconds)


def _notice_a_cut(connection: socket.socket) -> None:
    """Let the system find out that a network carries nothing any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(NETWORK_SECONDS // 3, 1)
    for name, value in (
        ("TCP_KEEPIDLE" if sys.platform != "darwin" else "TCP_KEEPALIVE", third),
        ("TCP_KEEPINTVL", third),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", NETWORK_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
