"""Replies: the record of a request, JSON replies and errors, large bodies in pieces, and
server-sent events.
"""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nano_inference.remote.tasks import start_task
from nano_inference.server.api.shared.answers import json_pieces
from nano_inference.server.errors import NO_RETRY, ApiError, api_error_of, shown
from nano_inference.server.paths import error_body

access = logging.getLogger("nano_inference.access")

_WATCHED = ("/health", "/ping", "/load", "/metrics", "/stats")
_LONGEST = 256  # maximum logged characters of a client's text
# printable ASCII, no spaces: safe in headers, logs and JSON
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestRecord:
    """Record of one HTTP request.

    Attributes:
        request_id: The client's `x-request-id`, or a new one.
        method, path: From the request line, with the path decoded. Untrusted.
        status: Status of the reply. 0: no reply has begun.
        session: The client's `x-session-id`. Its requests go to one replica.
        owner: Digest of the request's API key. "": the route needs none.
        is_admin: True if the request may see what belongs to other keys.
        has_version: True if the request has an `anthropic-version` header.
        traceparent: The header of this name, as sent by the client.
        model: Requested model, if the body could be read.
        num_samples, prompt_tokens, cached_tokens, completion_tokens: Counts of a generation.
        first_token: Seconds from arrival to the first tokens of a stream. None: no stream or no
            token.
        last_event: `time.perf_counter()` when the stream's last event was sent.
        seconds: Seconds from arrival to the end of the reply.
        problem: Code or message of the error that ended the request.
        started: `time.perf_counter()` at arrival.
    """

    request_id: str
    method: str
    path: str
    session: str | None = None
    owner: str = ""
    is_admin: bool = False
    has_version: bool = False
    traceparent: str | None = None
    status: int = 0
    model: str | None = None
    num_samples: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    last_event: float = 0.0
    seconds: float = 0.0
    problem: str | None = None
    started: float = field(default_factory=time.perf_counter)


def log_access(record: RequestRecord) -> None:
    """Log an answered request. Polls and files of the page are logged at DEBUG."""
    is_poll = record.path in _WATCHED and record.status in (200, 503)
    is_file = record.path.startswith("/page/") and record.status in (200, 304)
    level = logging.DEBUG if is_poll or is_file else logging.INFO
    if not access.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method[:16],
        "path": record.path[:_LONGEST],
        "status": record.status,
        "seconds": round(record.seconds, 4),
    }
    if record.model is not None:
        fields |= {
            "model": record.model,
            "n": record.num_samples,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
        }
    if record.first_token is not None:
        fields["first_token"] = round(record.first_token, 4)
    if record.problem is not None:
        fields["problem"] = record.problem[:_LONGEST]
    words = " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())
    access.log(level, "%s", words, extra={"fields": fields})


def _quoted(value: object) -> str:
    """Quote a value that could look like two fields."""
    text = str(value)
    return (
        json.dumps(text)
        if not text or any(each in ' "=' for each in text) or not text.isprintable()
        else text
    )


def request_id_of(header: bytes | None) -> str:
    """Return the client's id if it is safe in headers and logs, otherwise a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header.decode("ascii")
    return f"req_{secrets.token_hex(16)}"


def session_of(header: bytes | None) -> str | None:
    """Return the client's `x-session-id`, or None if it is missing or unsafe."""
    return header.decode("ascii") if header is not None and _SANE.fullmatch(header) else None


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request with this scope."""
    return scope["state"]["record"]


def json_reply(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a reply with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_reply(problem: ApiError, record: RequestRecord) -> Response:
    """Return an error reply, and note the error for the log."""
    record.problem = problem.code or problem.message
    # The client may still be sending its body, which is no longer read.
    close = (
        {"connection": "close"}
        if problem.status in (408, 413) or problem.code == "draining"
        else {}
    )
    body = error_body(record.path, problem, record.request_id, has_version=record.has_version)
    again = NO_RETRY if problem.status == 500 else {}  # a retry would hit the same bug
    return json_reply(problem.status, body, {**again, **problem.headers, **close})


def no_route(path: str) -> ApiError:
    """Make a 404 error for an unknown path."""
    return ApiError(404, f"there is no route {shown(path)}; GET / lists the routes.")


def error_reply_to(request: Request, problem: ApiError) -> Response:
    """Return an error reply to a route's request."""
    return error_reply(problem, record_of(request.scope))


PIECE = 64 * 1024  # minimum bytes made and sent together
WHOLE = 1 << 20  # bytes; larger replies are sent in pieces and without a length


async def reply_in_pieces(body: Any, *, aside: bool) -> Response:
    """Return a reply with a JSON body. Raises errors of making its first `WHOLE` bytes.

    Args:
        body: Body, as in `json_pieces`.
        aside: Make it in a thread, for replies that take milliseconds.
    """
    batches = _batches(json_pieces(body))
    made, size = list[bytes](), 0
    while size <= WHOLE:
        batch = await _next(batches, aside)
        if batch is None:
            return Response(b"".join(made), 200, media_type="application/json")
        made.append(batch)
        size += len(batch)
    return PiecedReply(made, batches)


class PiecedReply(Response):
    """Reply that sends the pieces made so far, then the rest piece by piece. Ends early if the
    client disconnects.

    Args:
        made: Beginning of the body.
        rest: Remaining pieces.
    """

    media_type = "application/json"

    def __init__(self, made: list[bytes], rest: Iterator[bytes]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._made, self._rest = made, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply (ASGI)."""
        connection = scope["state"].get("connection")
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        batch: bytes | None = b"".join(self._made)
        self._made.clear()
        while batch is not None and (connection is None or connection.is_open):
            await send({"type": "http.response.body", "body": batch, "more_body": True})
            batch = await _next(self._rest, True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _batches(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Join pieces into batches of at least `PIECE` bytes."""
    joined = bytearray()
    for piece in pieces:
        joined += piece
        if len(joined) >= PIECE:
            yield bytes(joined)
            joined.clear()
    if joined:
        yield bytes(joined)


async def _next(batches: Iterator[bytes], aside: bool) -> bytes | None:
    return await asyncio.to_thread(next, batches, None) if aside else next(batches, None)


KEEP_ALIVE = 15.0  # seconds without an event before a comment is sent
_NEVER = 1e9  # seconds
_COMMENT = b": keep-alive\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
_HEADERS = {
    "content-type": EVENT_STREAM,
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx waits until its buffer is full
}


def _stream_headers(more: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in (_HEADERS | dict(more)).items()]


class EventStream(Response):
    """Reply with server-sent events. Never raises the errors of `events`.

    Args:
        events: Events to send. Closed at the end.
        refuse: Makes the reply to an error raised before anything was sent.
        failure: Makes the event for a later error.
        around: Context entered before the first event is requested and left after the last one is
            sent.
        on_event: Called after each event.
        keep_alive: Seconds without an event before a comment is sent. None: no comments are sent.
        headers: Additional headers.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        refuse: Callable[[Exception], Response],
        failure: Callable[[Exception], bytes],
        around: AbstractContextManager[object],
        on_event: Callable[[], None],
        keep_alive: float | None = KEEP_ALIVE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._headers = _stream_headers(headers or {})
        self._events = events
        self._refuse = refuse
        self._failure = failure
        self._around = around
        self._on_event = on_event
        self._keep_alive = _NEVER if keep_alive is None else keep_alive
        self._begun = False
        self._last = 0.0  # time of the last data sent
        self._sending = self._ended = False
        self._comments: set[asyncio.Task[None]] = set()

    def continues(self) -> None:
        """Continue a stream whose start has been sent."""
        self._begun = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events (ASGI)."""
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(self._keep_alive, self._tick)
        try:
            with self._around:
                problem = await self._events_sent()
                self._ended = True
                self._timer.cancel()
                if problem is not None and not self._begun:
                    await self._refuse(problem)(scope, receive, send)
                    return
                last = b"" if problem is None else self._failure(problem)
                await self._begin()
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._timer.cancel()
            await self._events.aclose()

    async def _events_sent(self) -> Exception | None:
        """Send the events. Return the error that ended them early, if any."""
        try:
            async for event in self._events:
                await self._write(event)
                self._on_event()
        except Exception as problem:
            return problem
        return None

    async def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )

    async def _write(self, data: bytes) -> None:
        self._sending = True
        if not self._begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending = False
        self._last = self._loop.time()

    async def _comment(self) -> None:
        if not self._sending and not self._ended:  # unless data was sent since the timer fired
            await self._write(_COMMENT)

    def _tick(self) -> None:
        """Send a comment if nothing was sent for a while, unless the client does not even read
        earlier data.
        """
        quiet = self._loop.time() - self._last
        if quiet >= self._keep_alive and not self._sending:
            start_task(self._comment(), self._comments)
            quiet = 0.0
        self._timer = self._loop.call_later(max(0.001, self._keep_alive - quiet), self._tick)


class LateReply(Response):
    """Reply that is prepared while the client waits. If the client disconnects, the preparation is
    canceled.

    Args:
        prepare: Prepares the reply. Its errors are answered.
        refuse: Makes the reply to an error raised before anything was sent.
        failure: Makes the event for a later error.
        keep_alive: Seconds between comments that begin the stream. None: no comments are sent.
        held: Context to leave at the end.
    """

    def __init__(
        self,
        prepare: Callable[[], Coroutine[Any, Any, Response]],
        refuse: Callable[[Exception], Response],
        failure: Callable[[ApiError], bytes],
        keep_alive: float | None,
        held: AsyncExitStack,
    ) -> None:
        super().__init__()
        self._prepare, self._refuse, self._failure = prepare, refuse, failure
        self._keep_alive, self._held = keep_alive, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Prepare the reply and send it (ASGI)."""
        work = asyncio.ensure_future(self._prepare())
        watcher = asyncio.ensure_future(_disconnected(receive))
        begun = False
        try:
            async with self._held:
                while not work.done():
                    waiting = (work, watcher)
                    await asyncio.wait(
                        waiting, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED
                    )
                    if watcher.done() and not work.done():
                        record_of(scope).problem = "client disconnected"
                        return
                    if not work.done():
                        await _begin(send, begun)
                        begun = True
        finally:
            watcher.cancel()
            if not work.done():
                work.cancel()
            await asyncio.wait((work, watcher))
        problem = work.exception()
        if isinstance(problem, Exception) and not begun:
            await self._refuse(problem)(scope, receive, send)
        elif problem is None:
            reply = work.result()
            if begun and isinstance(reply, EventStream):
                reply.continues()
            await reply(scope, receive, send)
        else:
            error = api_error_of(problem)
            record_of(scope).problem = error.code or error.message
            last = self._failure(error)
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin(send: Send, begun: bool) -> None:
    """Send a comment, after the start of a stream if nothing was sent yet."""
    if not begun:
        headers = _stream_headers({})
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
