"""HTTP/1.1 for a load generator: one request at a time on a connection, read with as little work as
possible.

A reply's events are taken apart and given a time as they arrive; what is in them is read when the
load is over, so that the client costs the machine it shares with the server little. Plain
`asyncio`.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from ssl import create_default_context
from typing import cast

from nano_inference.errors import NanoInferenceError

# Kinds of what goes wrong.
UNREACHABLE = "unreachable"  # no connection
CUT_OFF = "cut off"  # the connection ended before the reply did
TIMEOUT = "timeout"
NO_HTTP = "no HTTP"

MAX_HEAD = 64 << 10  # bytes
_HEX = re.compile(rb"[0-9A-Fa-f]+")


class Broken(NanoInferenceError):
    """The connection ended, or what came over it is not HTTP.

    Attributes:
        kind: for counts: `UNREACHABLE`, `CUT_OFF`, `TIMEOUT`, `NO_HTTP`, or what a caller says.
    """

    def __init__(self, what: str, kind: str = NO_HTTP) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(slots=True)
class Reply:
    """What came back.

    Attributes:
        sent: when the request was handed to the system, by `time.perf_counter`; so are all times
            here.
        status: of the response.
        events: of an event stream: when each ended, and its data.
        body: of any other response.
        headers: by names in lower case.
        ended: when its last byte came.
    """

    sent: float
    status: int = 0
    events: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    body: bytes = b""
    ended: float = 0.0
    headers: dict[str, str] = field(default_factory=dict[str, str])


class Chunks:
    """Takes the chunked transfer coding off a body. `done` behind the last chunk and its
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
        self._left = 0  # bytes of the chunk that are still to come
        self._buffer = b""  # the begin of a line

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in `data`, which may begin and end anywhere. Raises `Broken`."""
        data, place, found = self._buffer + data, 0, list[bytes]()
        self._buffer = b""
        while place < len(data) and not self.done:
            if self._expects is self._Expects.DATA:
                part = data[place : place + self._left]
                found.append(part)
                place += len(part)
                self._left -= len(part)
                if not self._left:
                    self._expects = self._Expects.LINE_END
                continue
            end = data.find(b"\r\n", place)
            if end < 0:
                self._buffer = data[place:]
                if len(self._buffer) > MAX_HEAD:
                    raise Broken("a chunk's size line does not end")
                break
            self._line(data[place:end])
            place = end + 2
        return b"".join(found)

    def at_end(self) -> None:
        """The connection was closed: it must not be in the middle of a body."""
        if not self.done:
            raise Broken("the connection was closed in the middle of a chunked body", CUT_OFF)

    def _line(self, line: bytes) -> None:
        if self._expects is self._Expects.SIZE:
            size = line.partition(b";")[0].strip()
            if not _HEX.fullmatch(size):  # `int` also takes signs
                raise Broken(f"a chunk's size is {line[:40]!r}")
            self._left = int(size, 16)
            self._expects = self._Expects.DATA if self._left else self._Expects.TRAILER
        elif self._expects is self._Expects.LINE_END:
            if line:
                raise Broken(f"a chunk is longer than it said, by {line[:40]!r}")
            self._expects = self._Expects.SIZE
        elif not line:  # the empty line behind the trailers
            self.done = True


class Plain:
    """A body of a known length, or (None) one that ends with the connection."""

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
                f"the connection was closed with {self._left} bytes of the body to come", CUT_OFF
            )
        self.done = True


class Events:
    """The data of server-sent events; comments and the other fields are passed over."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that end in `data`; lines may end in LF or CRLF."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        found: list[bytes] = []
        for each in lines:
            line = each.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found


class Connection(asyncio.Protocol):
    """A connection to a server that is kept open from one request to the next."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._reply: Reply | None = None
        self._head = b""
        self._body: Chunks | Plain | None = None  # None: the head is still to come
        self._events: Events | None = None
        self._parts: list[bytes] = []
        self._closes = False

    @property
    def event_times(self) -> list[float]:
        """When the events of the reply that is under way, or of the last one, came so far."""
        return [when for when, _ in self._reply.events] if self._reply is not None else []

    @property
    def has_answered(self) -> bool:
        """Whether something has come of the reply that is under way, or of the last one."""
        return bool(self._head) or self._body is not None

    async def ask(self, request: bytes, timeout: float) -> Reply:
        """Send a whole request and wait for the whole reply. Raises `Broken`, also when it takes
        too long.
        """
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
            raise Broken(f"there was no whole reply within {timeout:g} s", TIMEOUT) from None
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
        """Drop the connection, whatever is under way."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is no subclass
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._answer is None or self._answer.done():
            self.close()  # it was not asked for
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
        """Take the head off; returns what follows it."""
        self._head += data
        while self._body is None:
            head, separator, rest = self._head.partition(b"\r\n\r\n")
            if not separator:
                if len(self._head) > MAX_HEAD:
                    raise Broken("the reply's head does not end")
                return b""
            self._head = rest
            self._begin(head)  # leaves the body None for an interim reply such as 100 Continue
        return self._head

    def _begin(self, head: bytes) -> None:
        assert self._reply is not None
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
            raise Broken(f"the reply begins with {first[:60]!r}")
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
    """A new connection, with `secure` over TLS. Raises `Broken`."""
    tls = create_default_context() if secure else None
    try:
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, host, port, ssl=tls
        )
    except OSError as problem:
        raise Broken(f"{host}:{port} cannot be reached: {problem}", UNREACHABLE) from None
    return connection
