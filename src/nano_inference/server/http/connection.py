"""`Connection`: uvicorn's HTTP/1.1 protocol with limits that it lacks, and with support for more
clients.

httptools buffers a header line until it ends (the cause of CVE-2025-48956 in another server). Here
bytes and header lines are counted as they arrive, and a connection that sends too many gets a 431.
An unfinished line may exceed the limit by one read of the socket (256 KiB).

A running request learns that its client disconnected even if pipelined requests wait for it.
Requests to upgrade the protocol are ignored, as HTTP allows: Java's clients ask for HTTP/2 with
their first request, and would lose its body. HTTP/1.0 gets no chunks, and trailers are not treated
as headers. Headers that two servers in a row could interpret differently are rejected: no or
several `Host` headers, and any transfer coding except `chunked`.

Only public names of uvicorn are used and overridden, which a test checks.
"""

import sys
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from nano_inference.server.door import HEALTH
from nano_inference.server.errors import ApiError, bad_request, retry_after
from nano_inference.server.http.replies import request_id_of
from nano_inference.server.paths import error_body

MAX_HEADERS = 128  # lines
MAX_PIPELINE = 100  # requests waiting on one connection
# seconds from a connection's start, or a request's first byte, to the end of its headers
HEAD_TIMEOUT = 30.0
# connections beyond `max_connections` that get a 503; further ones are closed without a reply
SPARE = 64
STALL_TIMEOUT = 60.0  # seconds that a client may leave a reply unread


class _Refused(Exception):
    """Raised in the parser's callbacks to stop it."""


class Connection(HttpToolsProtocol):
    """One connection. `connection_class` sets the limits."""

    max_header_bytes = 64 * 1024
    max_connections = 4096

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._refusal: ApiError | None = None
        self._size = self._lines = 0  # request line, headers and trailers of this request
        self._silent = 0  # bytes since the parser's last callback
        self._deadline: Any = None  # timer for the headers
        self._stall: Any = None
        # uvicorn's cycle of the request being answered; pipelined ones wait for it
        self._running: Any = None
        self._method = b""
        self._has_head = False  # this request's headers are complete
        self._wants_upgrade = False  # the headers ask for another protocol
        self._is_spare = False  # the connection exceeds `max_connections`

    def connection_made(self, transport: Any) -> None:
        """Handle a new connection."""
        super().connection_made(transport)
        self._set_deadline()
        excess = len(self.connections) - self.max_connections
        self._is_spare = excess > 0
        if excess > SPARE:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self._clear_deadline()
        self.resume_writing()
        self._leave(self._running)
        super().connection_lost(exc)  # only handles the last request

    @property
    def is_open(self) -> bool:
        """True if the client may still read replies."""
        return self.transport is not None and not self.transport.is_closing()

    def abort(self) -> None:
        """Close the connection immediately and discard unsent data."""
        if self.transport is not None:
            self.transport.abort()

    # -- headers -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        self._silent += len(data)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self._parse(data)
        if self._silent > self.max_header_bytes and not self.transport.is_closing():
            self._refusal = self._too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._silent = self._size = self._lines = 0
        self._has_head = self._wants_upgrade = False
        self.scope.setdefault("state", {})["connection"] = self
        if self._deadline is None:
            self._set_deadline()

    def on_url(self, url: bytes) -> None:
        """Count and parse a part of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header. Count trailers, which follow the body, and ignore them."""
        self._lines += 1
        self._count(len(name) + len(value) + 4)
        if not self._has_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check complete headers and start the request."""
        self._silent = 0
        self._has_head = True
        self._method = self.parser.get_method()
        self._wants_upgrade = self.parser.should_upgrade() and self._method != b"CONNECT"
        if self._wants_upgrade:
            return  # `_parse_again` parses it without the upgrade
        self._clear_deadline()
        self._refusal = self._fault()
        if self._refusal is not None:
            raise _Refused
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINE:
            self.abort()
        elif self.pipeline:
            self.flow.resume_reading()  # otherwise a disconnect would go unnoticed
        else:
            self._running = self.cycle

    def _fault(self) -> ApiError | None:
        """Return the reason to reject a request with complete headers, or None."""
        if self._is_spare and self.url.decode("latin-1") not in HEALTH:
            text = f"the server has {self.max_connections} open connections (max_connections)."
            return ApiError(503, text, code="overloaded", headers=retry_after(1.0))
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            return bad_request(f"a request must have one Host header; this one has {len(hosts)}.")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            return bad_request("the only supported transfer coding is chunked.")
        return None

    def on_chunk_header(self) -> None:
        """Begin a chunk of the body."""
        self._silent = 0

    def on_body(self, body: bytes) -> None:
        """Take in a part of the body."""
        self._silent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete the request."""
        self._silent = 0
        if not self._wants_upgrade:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Reply to an unparsable or rejected request in JSON, and close the connection."""
        problem = self._refusal or ApiError(400, "the request is not valid HTTP/1.1.")
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # another reply is being sent
            if self.cycle is not self._running or self.cycle.response_started:
                self.transport.abort()
                return
            self._leave(self.cycle)
        request_id = request_id_of(None)
        path = bytes(getattr(self, "url", b"")[:64]).decode("latin-1").partition("?")[0]
        body = msgspec.json.encode(error_body(path, problem, request_id))
        head = (
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n"
            % len(body)
        )
        ids = b"x-request-id: %b\r\nrequest-id: %b\r\n" % (request_id.encode(), request_id.encode())
        more = "".join(f"{name}: {value}\r\n" for name, value in problem.headers.items()).encode(
            "ascii"
        )
        self.transport.write(STATUS_LINE[problem.status] + head + ids + more + b"\r\n" + body)
        self.transport.close()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            (length,) = upgrade.args
            self._parse_again(data[length:])
        except httptools.HttpParserError:
            self.logger.debug("cannot parse a request")
            self.send_400_response("")

    def _parse_again(self, rest: bytes) -> None:
        """Parse a request's headers again without those that ask for an upgrade, then the data
        after them.
        """
        others = [
            (name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in others)
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"%b %b HTTP/1.1\r\n%b\r\n" % (self._method, self.url, lines) + rest)

    def _count(self, size: int) -> None:
        self._silent = 0
        self._size += size
        if self._size > self.max_header_bytes or self._lines > MAX_HEADERS:
            self._refusal = self._too_large()
            raise _Refused

    def _too_large(self) -> ApiError:
        limits = f"{self.max_header_bytes} bytes (max_header_bytes) and {MAX_HEADERS} lines"
        return ApiError(431, f"the request's headers exceed {limits}.")

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT, self.abort)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # -- answers -----------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """End a reply, and answer the next waiting request."""
        waiting = (
            self.pipeline[-1][0] if self.pipeline and not self.transport.is_closing() else None
        )
        super().on_response_complete()
        if waiting is not None:
            self._running = waiting

    def _leave(self, cycle: Any) -> None:
        """Notify a request that its client has disconnected."""
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def begin_without_length(self) -> None:
        """Send the following body without chunks, which HTTP/1.0 lacks. The connection's end
        ends it.
        """
        self._running.chunked_encoding = False
        self._running.expected_content_length = sys.maxsize

    def end_without_length(self, last: bytes) -> None:
        """Prepare to send the last part of such a body."""
        self._running.expected_content_length = len(last)

    # -- slow readers
    # ----------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Limit the time in which the client must catch up."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_TIMEOUT, self.abort)

    def resume_writing(self) -> None:
        """Cancel the limit: the client has caught up."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()


def connection_class(max_header_bytes: int, max_connections: int) -> type[Connection]:
    """Return a subclass of `Connection` with these limits, since uvicorn takes a class."""
    limits = {"max_header_bytes": max_header_bytes, "max_connections": max_connections}
    return type("Connection", (Connection,), limits)
