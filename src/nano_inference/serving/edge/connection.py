"""`Connection`: uvicorn's HTTP/1.1 protocol with bounds that it lacks, on headers and on clients that stall.

httptools keeps whatever arrives of a header line until the line ends (CVE-2025-48956 was that, in another server).
Here bytes and header lines are counted while they come, and a connection that brings too many is answered 431. A
line that does not end may exceed the bound by what one read of the socket brings (256 KiB).
"""

from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from nano_inference.serving.edge.record import request_id_of
from nano_inference.serving.errors import ApiError, error_body

MAX_HEADERS = 128  # lines
HEAD_TIMEOUT = 30.0  # seconds from a connection's start, or a request's first byte, to the end of its headers
STALL_TIMEOUT = 60.0  # seconds that a client may leave an answer unread


class _Refused(Exception):
    """Raised within the parser's callbacks: it stops there."""


class Connection(HttpToolsProtocol):
    """One connection. `max_header_bytes` is set by `connection_class`."""

    max_header_bytes = 64 * 1024

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._refusal: ApiError | None = None
        self._size = self._lines = 0  # of the request line, headers and trailers of this request
        self._silent = 0  # bytes since the parser has last said something
        self._deadline: Any = None  # of the headers
        self._stall: Any = None

    def connection_made(self, transport: Any) -> None:
        """A client has come."""
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._clear_deadline()
        self.resume_writing()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection at once, whatever is still to be sent."""
        if self.transport is not None:
            self.transport.abort()

    # -- headers --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._silent += len(data)
        super().data_received(data)
        if self._silent > self.max_header_bytes and not self.transport.is_closing():
            self._refusal = self._too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._silent = self._size = self._lines = 0
        self.scope.setdefault("state", {})["connection"] = self
        if self._deadline is None:
            self._set_deadline()

    def on_url(self, url: bytes) -> None:
        """A piece of its path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or, after the body, a trailer."""
        self._lines += 1
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """All headers are there."""
        self._silent = 0
        self._clear_deadline()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """A chunk of the body begins."""
        self._silent = 0

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._silent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._silent = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, in JSON, and hang up."""
        problem = self._refusal or ApiError(400, "the request is not HTTP/1.1.")
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # its answer may have begun
            self.transport.abort()
            return
        request_id = request_id_of(None)
        path = bytes(getattr(self, "url", b"")[:64]).decode("latin-1").partition("?")[0]
        body = msgspec.json.encode(error_body(path, problem, request_id))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        ids = b"x-request-id: %b\r\nrequest-id: %b\r\n\r\n" % (request_id.encode(), request_id.encode())
        self.transport.write(STATUS_LINE[problem.status] + head + ids + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._silent = 0
        self._size += size
        if self._size > self.max_header_bytes or self._lines > MAX_HEADERS:
            self._refusal = self._too_large()
            raise _Refused

    def _too_large(self) -> ApiError:
        limits = f"{self.max_header_bytes} bytes (max_header_bytes) and {MAX_HEADERS} lines"
        return ApiError(431, f"the request's headers are more than {limits}.")

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT, self.abort)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # -- clients that do not read ---------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer comes."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_TIMEOUT, self.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()


def connection_class(max_header_bytes: int) -> type[Connection]:
    """`Connection` with this bound: uvicorn wants a class."""
    return type("Connection", (Connection,), {"max_header_bytes": max_header_bytes})
