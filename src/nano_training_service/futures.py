"""Results that clients come back for."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from nano_training_service.errors import Refused

# bytes: Protocol Buffers; a mapping: JSON; `Refused`: the request failed
Result = bytes | dict[str, Any] | Refused

_OVERHEAD = 1024  # bytes of a future, about


class Future:
    """A request that was taken, and its result once there is one. For the event loop's thread.

    Args:
        request_id: of the client's, or made.
        model_id: of the model in training, if it is of one.
        ended: called once, when there is a result.
    """

    def __init__(
        self, request_id: str, model_id: str | None, ended: Callable[["Future"], None]
    ) -> None:
        self.request_id = request_id
        self.model_id = model_id
        self.result: Result | None = None
        self.ended = 0.0  # `time.monotonic()`
        self.task: asyncio.Task[None] | None = None  # of a sample, which can be cancelled
        self._tell = ended
        self._event = asyncio.Event()

    @property
    def size(self) -> int:
        """Bytes that its result takes, about."""
        return _OVERHEAD + (len(self.result) if isinstance(self.result, bytes) else 0)

    def finish(self, result: Result) -> None:
        """Set the result; the first counts."""
        if self.result is None:
            self.result, self.ended = result, time.monotonic()
            self._tell(self)
            self._event.set()

    async def wait(self, seconds: float) -> Result | None:
        """The result, or None if there is none yet after so long."""
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return None
        return self.result


class Futures:
    """All of a service, by request id. A request that comes twice gets the same future.

    Args:
        max_pending: requests without a result.
        max_bytes: of results that wait to be fetched.
        keep: seconds that a result is kept.
    """

    def __init__(self, max_pending: int, max_bytes: int, keep: float) -> None:
        self._max_pending, self._max_bytes, self._keep = max_pending, max_bytes, keep
        self._pending: dict[str, Future] = {}
        # those with results, the oldest first
        self._waiting: dict[str, Future] = {}
        self._fetched: dict[str, Future] = {}
        self._bytes = 0  # of both

    def known(self, request_id: str) -> Future | None:
        """A request that came before, if its result is still kept."""
        for place in (self._pending, self._waiting, self._fetched):
            if request_id in place:
                return place[request_id]
        return None

    def new(self, request_id: str, model_id: str | None = None) -> Future:
        """A future for a new request. Raises `Refused` 429 if too many have no result yet, or if
        unfetched results take too much memory.
        """
        if len(self._pending) >= self._max_pending:
            raise Refused(
                f"{len(self._pending)} requests wait; {self._max_pending} may at once "
                "(max_pending).",
                429,
                "server",
            )
        if self._bytes > self._max_bytes:
            raise Refused(
                f"results of {self._bytes:,} bytes wait to be fetched; {self._max_bytes:,} may "
                "(max_result_bytes). Fetch some, and try again.",
                429,
                "server",
            )
        made = self._pending[request_id] = Future(request_id, model_id, self._ended)
        return made

    async def fetch(self, request_id: str, seconds: float) -> Result | None:
        """The result of a request, or None if there is none yet after so long. Raises `Refused` 410
        for one that is unknown or no longer kept: the client may then send the request again.
        """
        found = self.known(request_id)
        if found is None:
            raise Refused(
                f"there is no result of {request_id!r}: it is unknown, or was kept for "
                f"{self._keep:g} seconds (result_timeout), or was fetched and made room for others "
                "(max_result_bytes).",
                410,
                "server",
            )
        result = await found.wait(seconds)
        if self._waiting.pop(request_id, None) is not None:
            self._fetched[request_id] = found
            self._make_room()
        return result

    def sweep(self) -> None:
        """Forget results that have been kept long enough."""
        now = time.monotonic()
        for place in (self._waiting, self._fetched):
            for request_id, each in list(place.items()):
                if now - each.ended > self._keep:
                    self._forget(place, request_id)

    def _ended(self, future: Future) -> None:
        del self._pending[future.request_id]
        self._waiting[future.request_id] = future
        self._bytes += future.size
        self._make_room()

    def _make_room(self) -> None:
        """Forget the oldest results that were fetched; the client may still ask for them again, so
        they are kept while there is room.
        """
        while self._bytes > self._max_bytes and self._fetched:
            self._forget(self._fetched, next(iter(self._fetched)))

    def _forget(self, place: dict[str, Future], request_id: str) -> None:
        self._bytes -= place.pop(request_id).size
