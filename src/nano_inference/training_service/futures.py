"""Results that clients come back for."""

import asyncio
import time
from typing import Any

from nano_inference.training_service.errors import Refused

# bytes: Protocol Buffers; a mapping: JSON; `Refused`: the request failed
Result = bytes | dict[str, Any] | Refused


class Future:
    """A request that was taken, and its result once there is one. For the event loop's thread."""

    def __init__(self, request_id: str, model_id: str | None = None) -> None:
        self.request_id = request_id
        self.model_id = model_id
        self.result: Result | None = None
        self.ended = 0.0  # `time.monotonic()`
        self.task: asyncio.Task[None] | None = None  # of a sample, which can be cancelled
        self._event = asyncio.Event()

    def finish(self, result: Result) -> None:
        """Set the result; the first counts."""
        if self.result is None:
            self.result, self.ended = result, time.monotonic()
            self._event.set()

    async def wait(self, seconds: float) -> Result | None:
        """The result, or None if there is none yet after so long."""
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return None
        return self.result


class Futures:
    """All of a service, by request id. A request that comes twice gets the same future."""

    def __init__(self, max_pending: int, keep: float) -> None:
        self._max_pending, self._keep = max_pending, keep
        self._known: dict[str, Future] = {}

    def known(self, request_id: str) -> Future | None:
        """A request that came before, if its result is still kept."""
        return self._known.get(request_id)

    def new(self, request_id: str, model_id: str | None = None) -> Future:
        """A future for a new request. Raises `Refused` 429 where too many have no result yet."""
        pending = sum(each.result is None for each in self._known.values())
        if pending >= self._max_pending:
            raise Refused(
                f"{pending} requests wait; {self._max_pending} may at once (max_pending).",
                429,
                "server",
            )
        made = self._known[request_id] = Future(request_id, model_id)
        return made

    def get(self, request_id: str) -> Future:
        """Raises `Refused` 410 for one that is unknown or no longer kept: the client may then send
        the request anew.
        """
        found = self._known.get(request_id)
        if found is None:
            raise Refused(
                f"there is no result of {request_id!r}: it is unknown, or was kept for "
                f"{self._keep:g} seconds (result_timeout).",
                410,
                "server",
            )
        return found

    def sweep(self) -> None:
        """Forget results that have been kept long enough."""
        now = time.monotonic()
        self._known = {
            request_id: each
            for request_id, each in self._known.items()
            if each.result is None or now - each.ended <= self._keep
        }
