"""`EventStream`: server-sent events, with one plain `send` an event and no task of its own.

Nothing is sent until there is an event, so that a request which the engine refuses is answered with
a plain status. Only when nothing has come for `KEEP_ALIVE` seconds does the stream begin with a
comment, which keeps proxies and clients from giving up; what goes wrong after that is an event, as
it is in the middle of a stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        refuse: Callable[[Exception], Response],
        failure: Callable[[Exception], bytes],
        around: AbstractContextManager[object],
        on_event: Callable[[], None],
        keep_alive: float = KEEP_ALIVE,
    ) -> None:
        super().__init__()
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
        # HTTP/1.0 knows no chunks; proxies speak it too.
        self._unsized = (
            scope["state"].get("connection") if scope.get("http_version") == "1.0" else None
        )
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
                if self._unsized is not None:
                    self._unsized.end_without_length(last)
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
            if self._unsized is not None:
                self._unsized.begin_without_length()
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
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
            task = self._loop.create_task(self._comment())
            self._comments.add(task)
            task.add_done_callback(self._comments.discard)
            quiet = 0.0
        self._timer = self._loop.call_later(max(0.001, self._keep_alive - quiet), self._tick)
