"""Answers: what is known of a request, plain replies and errors, large bodies in pieces, and
server-sent events.
"""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nano_inference.remote.tasks import start_task
from nano_inference.server.api.shared.answers import json_pieces
from nano_inference.server.errors import NO_RETRY, ApiError, shown
from nano_inference.server.paths import error_body

access = logging.getLogger("nano_inference.access")

_WATCHED = ("/health", "/ping", "/load", "/metrics", "/stats")
_LONGEST = 256  # characters of what a client sent
# printable ASCII, no spaces: safe in headers, logs and JSON
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request.

    Attributes:
        request_id: the client's `x-request-id`, or one made here.
        method, path: of the request line, the path decoded; not to be trusted.
        status: of the answer; 0: none has begun.
        session: the client's `x-session-id`: its requests go to one replica.
        has_version: it has an `anthropic-version` header.
        traceparent: its header of this name, as the client sent it.
        model: that was asked for, where the body could be read.
        num_samples, prompt_tokens, cached_tokens, completion_tokens: of a generation.
        first_token: seconds from its arrival to its first tokens; None: it had none, or did not
            stream.
        last_event: `time.perf_counter()` when the last event of its stream was sent.
        seconds: from its arrival to the end of its answer.
        problem: the code or message of the error it ended in.
        started: `time.perf_counter()` at its arrival.
    """

    request_id: str
    method: str
    path: str
    session: str | None = None
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
    """Log a request that has been answered. Polls and files of the page are logged at DEBUG."""
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
    """So that a value cannot look like two fields."""
    text = str(value)
    return (
        json.dumps(text)
        if not text or any(each in ' "=' for each in text) or not text.isprintable()
        else text
    )


def request_id_of(header: bytes | None) -> str:
    """The client's own where it can be echoed and logged as it is, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header.decode("ascii")
    return f"req_{secrets.token_hex(16)}"


def session_of(header: bytes | None) -> str | None:
    """The client's `x-session-id`; what no sane client sends is none."""
    return header.decode("ascii") if header is not None and _SANE.fullmatch(header) else None


def record_of(scope: Scope) -> RequestRecord:
    """That of the request with this scope."""
    return scope["state"]["record"]


def json_reply(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A body of JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_reply(problem: ApiError, record: RequestRecord) -> Response:
    """An error; what it was is kept for the log."""
    record.problem = problem.code or problem.message
    # A client that was refused before its body was read may still be sending it: it is not listened
    # to any more.
    close = (
        {"connection": "close"}
        if problem.status in (408, 413) or problem.code == "draining"
        else {}
    )
    body = error_body(record.path, problem, record.request_id, has_version=record.has_version)
    again = NO_RETRY if problem.status == 500 else {}  # the same bug would be met three times
    return json_reply(problem.status, body, {**again, **problem.headers, **close})


def no_route(path: str) -> ApiError:
    """404."""
    return ApiError(404, f"there is no route {shown(path)}; GET / names those that there are.")


def error_reply_to(request: Request, problem: ApiError) -> Response:
    """The same for a route."""
    return error_reply(problem, record_of(request.scope))


PIECE = 64 * 1024  # bytes that are made and sent together
WHOLE = 1 << 20  # bytes up to which an answer is sent as a whole, with its length


async def reply_in_pieces(body: Any, *, aside: bool) -> Response:
    """A reply with a body of JSON. Raises what making its first `WHOLE` bytes raises.

    Args:
        body: see `json_pieces`.
        aside: make it in a thread; worth its while for answers that take milliseconds.
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
    """Sends the pieces made so far, then the rest piece by piece. Ends early when the client has
    gone.

    Args:
        made: the body's beginning.
        rest: what follows.
    """

    media_type = "application/json"

    def __init__(self, made: list[bytes], rest: Iterator[bytes]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._made, self._rest = made, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        connection = scope["state"].get("connection")
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        batch: bytes | None = b"".join(self._made)
        self._made.clear()
        while batch is not None and (connection is None or connection.is_open):
            await send({"type": "http.response.body", "body": batch, "more_body": True})
            batch = await _next(self._rest, True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _batches(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Joined, so that no piece is small."""
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
_COMMENT = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would wait for its buffer to fill
]


class EventStream(Response):
    """A response. It never raises what `events` raises.

    Args:
        events: what to send; closed at the end.
        refuse: the response to what is raised before anything was sent.
        failure: the event of what is raised later.
        around: entered before the first event is asked for, left after the last one was sent.
        on_event: called with each that is sent.
        keep_alive: seconds without an event before a comment is sent.
        headers: beside those of every stream.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        refuse: Callable[[Exception], Response],
        failure: Callable[[Exception], bytes],
        around: AbstractContextManager[object],
        on_event: Callable[[], None],
        keep_alive: float = KEEP_ALIVE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        more = (headers or {}).items()
        self._headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in more)]
        self._events = events
        self._refuse = refuse
        self._failure = failure
        self._around = around
        self._on_event = on_event
        self._keep_alive = keep_alive
        self._begun = False
        self._last = 0.0  # when something was sent
        self._sending = self._ended = False
        self._comments: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
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
        """What ended them early."""
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
        if not self._sending and not self._ended:  # since it was time for one
            await self._write(_COMMENT)

    def _tick(self) -> None:
        """Once in a while: a comment if there was nothing, unless the client does not even read
        what there was.
        """
        quiet = self._loop.time() - self._last
        if quiet >= self._keep_alive and not self._sending:
            start_task(self._comment(), self._comments)
            quiet = 0.0
        self._timer = self._loop.call_later(max(0.001, self._keep_alive - quiet), self._tick)
