"""HTTP/1.1 client for a load generator, with one request at a time per connection.

Events of a reply are split and timestamped as they arrive. The caller parses them when the load is
over, so that the client takes little CPU from a server on the same machine. Uses plain `asyncio`.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from ssl import create_default_context
from typing import cast

from nano_inference.errors import NanoInferenceError

# Kinds of errors.
UNREACHABLE = "unreachable"  # no connection
CUT_OFF = "cut off"  # the connection ended before the reply did
TIMEOUT = "timeout"
NO_HTTP = "no HTTP"

MAX_HEAD = 64 << 10  # bytes
_HEX = re.compile(rb"[0-9A-Fa-f]+")


class Broken(NanoInferenceError):
    """A failed connection, or a reply that is not HTTP.

    Attributes:
        kind: Kind of the error for counts: `UNREACHABLE`, `CUT_OFF`, `TIMEOUT`, `NO_HTTP`, or one
            of the caller's.
    """

    def __init__(self, what: str, kind: str = NO_HTTP) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(slots=True)
class Reply:
    """A response. All times are from `time.perf_counter`.

    Attributes:
        sent: Time when the request was written to the socket.
        status: HTTP status.
        events: End time and data of each event of an event stream.
        body: Body of any other response.
        ended: Arrival time of the last byte.
        headers: Headers by name in lower case.
    """

    sent: float
    status: int = 0
    events: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    body: bytes = b""
    ended: float = 0.0
    headers: dict[str, str] = field(default_factory=dict[str, str])


class Chunks:
    """Decoder of the chunked transfer coding. `done` is True after the last chunk and its
    trailers.
    """

    class _Expects(Enum):
        SIZE = auto()
        DATA = auto()
        LINE_END = auto()
        TRAILER = auto()

    def __init__(self) -> None:
        self.done = False
        self._expects = self._Expects.SIZE
        self._left = 0  # remaining bytes of the chunk
        self._buffer = b""  # an incomplete line

    def feed(self, data: bytes) -> bytes:
        """Return the body's bytes in `data`, which may begin and end anywhere. Raises `Broken`."""
        data, position, parts = self._buffer + data, 0, list[bytes]()
        self._buffer = b""
        while position < len(data) and not self.done:
            if self._expects is self._Expects.DATA:
                part = data[position : position + self._left]
                parts.append(part)
                position += len(part)
                self._left -= len(part)
                if not self._left:
                    self._expects = self._Expects.LINE_END
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                self._buffer = data[position:]
                if len(self._buffer) > MAX_HEAD:
                    raise Broken("a chunk's size line exceeds the limit")
                break
            self._line(data[position:end])
            position = end + 2
        return b"".join(parts)

    def at_end(self) -> None:
        """Handle the end of the connection. Raises `Broken` in the middle of a body."""
        if not self.done:
            raise Broken("the connection was closed in the middle of a chunked body", CUT_OFF)

    def _line(self, line: bytes) -> None:
        if self._expects is self._Expects.SIZE:
            size = line.partition(b";")[0].strip()
            if not _HEX.fullmatch(size):  # `int` also takes signs
                raise Broken(f"a chunk has the invalid size {line[:40]!r}")
            self._left = int(size, 16)
            self._expects = self._Expects.DATA if self._left else self._Expects.TRAILER
        elif self._expects is self._Expects.LINE_END:
            if line:
                raise Broken(f"a chunk exceeds its size by {line[:40]!r}")
            self._expects = self._Expects.SIZE
        elif not line:  # the empty line after the trailers
            self.done = True


class Plain:
    """Decoder of a body of known length. None: the body ends with the connection."""

    def __init__(self, length: int | None) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        if self._left is None:
            return data
        if len(data) > self._left:
            raise Broken(f"{len(data) - self._left} bytes follow the body")
        self._left -= len(data)
        self.done = not self._left
        return data

    def at_end(self) -> None:
        if self._left:
            raise Broken(
                f"the connection was closed with {self._left} bytes of the body missing", CUT_OFF
            )
        self.done = True


class Events:
    """Parser of server-sent events, which ignores comments and all fields except data."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of events that end in `data`. Lines may end in LF or CRLF."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        events: list[bytes] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class Connection(asyncio.Protocol):
    """A persistent connection to a server."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._reply: Reply | None = None
        self._head = b""
        self._body: Chunks | Plain | None = None  # None: the head is incomplete
        self._events: Events | None = None
        self._parts: list[bytes] = []
        self._closes = False

    @property
    def event_times(self) -> list[float]:
        """Arrival times of the events in the current or last reply."""
        return [when for when, _ in self._reply.events] if self._reply is not None else []

    @property
    def has_answered(self) -> bool:
        """True if any byte of the current or last reply has arrived."""
        return bool(self._head) or self._body is not None

    async def ask(self, request: bytes, timeout: float) -> Reply:
        """Send a request and wait for the complete reply. Raises `Broken`, also on timeout."""
        if self._transport is None or not self.is_open:
            raise Broken("the connection is closed", CUT_OFF)
        self._answer = asyncio.get_running_loop().create_future()
        self._head, self._body, self._events, self._parts = b"", None, None, []
        self._reply = Reply(time.perf_counter())
        self._transport.write(request)
        try:
            async with asyncio.timeout(timeout):
                return await self._answer
        except TimeoutError:
            raise Broken(f"no complete reply within {timeout:g} s", TIMEOUT) from None
        finally:
            if (
                self._closes
                or not self._answer.done()
                or self._answer.cancelled()
                or self._answer.exception()
            ):
                self.close()
            self._answer = None

    def close(self) -> None:
        """Close the connection, even during a request."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._answer is None or self._answer.done():
            self.close()  # unsolicited data
            return
        try:
            if self._body is None:
                data = self._read_head(data)
            if self._body is not None and data:
                self._take(self._body.feed(data), now)
            if self._body is not None and self._body.done:
                self._finish(now)
        except Broken as problem:
            self._answer.set_exception(problem)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is None or self._answer.done():
            return
        try:
            if self._body is None:
                raise Broken("the connection was closed before a reply", CUT_OFF)
            self._body.at_end()
            self._finish(time.perf_counter())
        except Broken as problem:
            self._answer.set_exception(problem)

    def _read_head(self, data: bytes) -> bytes:
        """Parse the head and return the bytes after it."""
        self._head += data
        while self._body is None:
            head, separator, rest = self._head.partition(b"\r\n\r\n")
            if not separator:
                if len(self._head) > MAX_HEAD:
                    raise Broken("the reply's head exceeds the limit")
                return b""
            self._head = rest
            self._begin(head)  # leaves the body None for an interim reply such as 100 Continue
        return self._head

    def _begin(self, head: bytes) -> None:
        assert self._reply is not None
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
            raise Broken(f"the reply is not HTTP: it begins with {first[:60]!r}")
        fields = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        status = int(parts[1])
        if 100 <= status < 200:
            return
        self._reply.status, self._reply.headers = status, fields
        self._closes = fields.get("connection", "").lower() == "close"
        if fields.get("content-type", "").startswith("text/event-stream"):
            self._events = Events()
        if "chunked" in fields.get("transfer-encoding", "").lower():
            self._body = Chunks()
        elif status in (204, 304):
            self._body = Plain(0)
        else:
            length = fields.get("content-length")
            self._body = Plain(int(length) if length and length.isdecimal() else None)

    def _take(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        if self._events is None:
            self._parts.append(data)
        else:
            self._reply.events += [(now, event) for event in self._events.feed(data)]

    def _finish(self, now: float) -> None:
        assert self._reply is not None
        assert self._answer is not None
        self._reply.body, self._reply.ended = b"".join(self._parts), now
        self._answer.set_result(self._reply)


async def connect(host: str, port: int, secure: bool = False) -> Connection:
    """Open a connection, over TLS if `secure`. Raises `Broken`."""
    tls = create_default_context() if secure else None
    try:
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, host, port, ssl=tls
        )
    except OSError as problem:
        raise Broken(f"cannot connect to {host}:{port}: {problem}", UNREACHABLE) from None
    return connection
