"""Answers that are made without a client. Readers of their events may come, leave and resume."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from nano_inference.server.errors import ApiError


class Detached:
    """An answer in the background. Used on the event loop, except by `snapshot`.

    Args:
        snapshot: Returns the answer so far.
        keeps_events: False: its events cannot be read.
        grew: Called with the number of bytes that new events need. Raises `ApiError` to end the
            answer.

    Attributes:
        is_running: False once the last event has come.
    """

    def __init__(
        self,
        snapshot: Callable[[], Mapping[str, Any]],
        *,
        keeps_events: bool,
        grew: Callable[[int], None],
    ) -> None:
        self.snapshot = snapshot
        self.keeps_events = keeps_events
        self.is_running = True
        self._grew = grew
        self._events: list[bytes] = []
        self._waiting: set[asyncio.Event] = set()
        self._end: Callable[[ApiError], None] | None = None

    def begin(self, end: Callable[[ApiError], None]) -> None:
        """Set the function that ends the generation with an error."""
        self._end = end

    def append(self, events: bytes) -> None:
        """Add events, each of which ends with an empty line. Raises `ApiError` if there is no room
        for them.
        """
        if self.keeps_events and events:
            self._grew(len(events))
            self._add(events)

    def close(self, last: bytes = b"") -> None:
        """Add the last events, and inform the readers that no more come."""
        self.is_running = False
        if self.keeps_events:
            self._add(last)
        self._wake()

    async def stop(self, problem: ApiError) -> None:
        """End the generation with an error, and wait for its last event."""
        if self._end is not None:
            self._end(problem)
        news = asyncio.Event()
        self._waiting.add(news)
        try:
            while self.is_running:
                news.clear()
                await news.wait()
        finally:
            self._waiting.discard(news)

    def reader(self, number: int = 0) -> "Reader":
        """Return a reader of the events from this number on."""
        return Reader(self._events, self._waiting, number, lambda: self.is_running)

    def _add(self, events: bytes) -> None:
        self._events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self._wake()

    def _wake(self) -> None:
        for news in self._waiting:
            news.set()


class Reader:
    """Reader of the events of a detached answer."""

    def __init__(
        self,
        events: list[bytes],
        waiting: set[asyncio.Event],
        number: int,
        is_running: Callable[[], bool],
    ) -> None:
        self._events, self._waiting, self._number = events, waiting, number
        self._is_running = is_running
        self._news = asyncio.Event()
        self._is_closed = False

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield events as they come."""
        self._waiting.add(self._news)
        try:
            while not self._is_closed:
                self._news.clear()
                if more := self._events[self._number :]:
                    self._number += len(more)
                    yield b"".join(more)
                elif not self._is_running():
                    return
                else:
                    await self._news.wait()
        finally:
            self._waiting.discard(self._news)

    def close(self) -> None:
        """Stop reading: `events` then ends."""
        self._is_closed = True
        self._news.set()
