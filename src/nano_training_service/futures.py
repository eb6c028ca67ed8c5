"""Results of requests, kept until clients fetch them."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from nano_training_service.errors import Refused

# bytes: Protocol Buffers; a mapping: JSON; `Refused`: the request failed
Result = bytes | dict[str, Any] | Refused

_OVERHEAD = 1024  # approximate bytes of a future


class Future:
    """An accepted request and its result once available. For the event loop's thread.

    Args:
        request_id: Id that the client sent or the service generated.
        model_id: Id of the model in training, or None.
        ended: Callback that is called once, when the result is set.
    """

    def __init__(
        self, request_id: str, model_id: str | None, ended: Callable[["Future"], None]
    ) -> None:
        self.request_id = request_id
        self.model_id = model_id
        self.result: Result | None = None
        self.ended = 0.0  # `time.monotonic()`
        self.task: asyncio.Task[None] | None = None  # the task of a sample, which can be cancelled
        self._tell = ended
        self._event = asyncio.Event()

    @property
    def size(self) -> int:
        """Approximate bytes of memory for the result."""
        return _OVERHEAD + (len(self.result) if isinstance(self.result, bytes) else 0)

    def finish(self, result: Result) -> None:
        """Set the result. Later calls are ignored."""
        if self.result is None:
            self.result, self.ended = result, time.monotonic()
            self._tell(self)
            self._event.set()

    async def wait(self, seconds: float) -> Result | None:
        """Return the result, or None if it is not available within `seconds`."""
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return None
        return self.result


class Futures:
    """All futures of a service, by request id. A repeated request gets the same future.

    Args:
        max_pending: Maximum requests without a result.
        max_bytes: Maximum size of all kept results.
        keep: Seconds for which a result is kept.
    """

    def __init__(self, max_pending: int, max_bytes: int, keep: float) -> None:
        self._max_pending, self._max_bytes, self._keep = max_pending, max_bytes, keep
        self._pending: dict[str, Future] = {}
        # futures with results, oldest first
        self._waiting: dict[str, Future] = {}
        self._fetched: dict[str, Future] = {}
        self._bytes = 0  # size of the futures in both

    def known(self, request_id: str) -> Future | None:
        """Return the future of an earlier request, or None if it is no longer kept."""
        for futures in (self._pending, self._waiting, self._fetched):
            if request_id in futures:
                return futures[request_id]
        return None

    def new(self, request_id: str, model_id: str | None = None) -> Future:
        """Return a future for a new request. Raises `Refused` 429 if too many requests have no
        result yet, or if unfetched results take too much memory.
        """
        if len(self._pending) >= self._max_pending:
            raise Refused(
                f"{len(self._pending)} requests are pending, which is the limit (max_pending); try "
                "again later.",
                429,
                "server",
            )
        if self._bytes > self._max_bytes:
            raise Refused(
                f"unfetched results take {self._bytes:,} bytes, which exceeds the limit of "
                f"{self._max_bytes:,} (max_result_bytes). Fetch some, and try again.",
                429,
                "server",
            )
        made = self._pending[request_id] = Future(request_id, model_id, self._ended)
        return made

    async def fetch(self, request_id: str, seconds: float) -> Result | None:
        """Return a request's result, or None if it is not available within `seconds`. Raises
        `Refused` 410 if the request is unknown or no longer kept. The client may then resend it.
        """
        future = self.known(request_id)
        if future is None:
            raise Refused(
                f"there is no result of {request_id!r}: it is unknown, or expired after "
                f"{self._keep:g} seconds (result_timeout), or was fetched and deleted to free "
                "memory (max_result_bytes).",
                410,
                "server",
            )
        result = await future.wait(seconds)
        if self._waiting.pop(request_id, None) is not None:
            self._fetched[request_id] = future
            self._make_room()
        return result

    def sweep(self) -> None:
        """Delete expired results."""
        now = time.monotonic()
        for futures in (self._waiting, self._fetched):
            for request_id, future in list(futures.items()):
                if now - future.ended > self._keep:
                    self._forget(futures, request_id)

    def _ended(self, future: Future) -> None:
        del self._pending[future.request_id]
        self._waiting[future.request_id] = future
        self._bytes += future.size
        self._make_room()

    def _make_room(self) -> None:
        """Delete the oldest fetched results until the size is within the limit. Others are kept
        because the client may fetch them again.
        """
        while self._bytes > self._max_bytes and self._fetched:
            self._forget(self._fetched, next(iter(self._fetched)))

    def _forget(self, futures: dict[str, Future], request_id: str) -> None:
        self._bytes -= futures.pop(request_id).size
