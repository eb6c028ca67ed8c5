"""Links between rank 0 and the workers: length-prefixed frames over a socket.

Both ends have proved that they belong to the same engine (`rendezvous.py`). The frames are msgpack
bytes, without encryption or signatures, like the traffic of gloo and NCCL. A private network is
assumed between machines.
"""

import contextlib
import socket
import struct
import sys
import threading
import time

from nano_inference.errors import NanoInferenceError

FRAME_BYTES = 2**29  # maximum of a frame, such as the masks of a batch with a large vocabulary
BUFFER_BYTES = 2**18  # size of the read buffer
NETWORK_SECONDS = 30  # time without traffic after which a network is considered cut

_LENGTH = struct.Struct(">I")


class LinkLost(NanoInferenceError):
    """Lost link: the other end is gone, or did not respond in time."""


class Link:
    """One end of a connection. Only one thread may receive. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._socket = connection
        self._file = connection.makefile("rb", BUFFER_BYTES)
        self._sending = threading.Lock()
        self._closed = self._is_late = False
        self._deadline: threading.Timer | None = None

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def send(self, frame: bytes | bytearray) -> None:
        """Send a frame. Return when the system has accepted it. Raises `LinkLost`."""
        if len(frame) > FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame):,} bytes exceeds {FRAME_BYTES:,}.")
        with self._sending:
            try:
                header = _LENGTH.pack(len(frame))
                sent = self._socket.sendmsg([header, frame])
                # the system always accepts more than the header
                if sent < len(header) + len(frame):
                    self._socket.sendall(memoryview(frame)[sent - len(header) :])
            except (TimeoutError, BlockingIOError):
                self.close()  # the frame may be incomplete
                raise LinkLost("the peer stopped reading") from None
            except OSError as problem:
                raise self._lost(problem) from problem

    def receive(self, most: int = FRAME_BYTES) -> bytes:
        """Return the next frame, of at most `most` bytes. Raises `LinkLost`."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > most:
            self.close()
            raise LinkLost(f"the peer sent a frame of {length:,} bytes, limit {most:,}")
        return self._take(length)

    def close(self) -> None:
        """Close the link, also for a thread that is waiting on it."""
        if not self._closed:
            self._closed = True
            self.set_deadline(None)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._file.close()

    def set_deadline(self, seconds: float | None) -> None:
        """Close the link after this many seconds, or never if None. Used for greetings."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = threading.Timer(seconds, self._end_late)
            self._deadline.daemon = True
            self._deadline.start()

    def settle(self, send_seconds: float) -> None:
        """Wait without limit in `receive`, and at most `send_seconds` in `send`, from now on."""
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
            return LinkLost("the peer does not answer")
        hung_up = ConnectionResetError | BrokenPipeError | ValueError | None
        return LinkLost("the peer hung up" if isinstance(problem, hung_up) else str(problem))


class Listener:
    """Socket on which rank 0 waits for the other ranks.

    Args:
        path: Path of a socket in a private folder. None means `host`.
        host: Address of this machine for the other ranks.
        port: Port to listen on. 0 means any free port.

    Raises `OSError` if it cannot listen.
    """

    def __init__(self, path: str | None = None, host: str | None = None, port: int = 0) -> None:
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where: str | tuple[str, int] = path
        else:
            assert host is not None
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            where = str(address[0]), port
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
        """Return the next connection, or None after `seconds`."""
        self._socket.settimeout(max(seconds, 0.001))
        try:
            return Link(self._socket.accept()[0])
        except TimeoutError:
            return None

    def close(self) -> None:
        """Stop accepting connections."""
        self._socket.close()


def connect(address: str, seconds: float) -> Link:
    """Connect to rank 0. Raises `LinkLost`."""
    kind, _, where = address.partition(":")
    end = time.monotonic() + seconds
    while True:
        left = max(end - time.monotonic(), 0.001)
        try:
            return Link(_connected(where, left) if kind == "unix" else _connected_tcp(where, left))
        except OSError as problem:
            if time.monotonic() > end:
                raise LinkLost(f"cannot reach rank 0 at {address}: {problem}") from problem
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
    """Let the system detect a cut network."""
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
