"""`Bodies`: what is read of requests and not yet worked off, bounded over all connections."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.requests import Request

from nano_inference.serving.errors import NO_RETRY, ApiError, retry_after

# bytes of a body that are not counted: what others hold up keeps no ordinary request out
SMALL = 64 * 1024


class Bodies:
    """Reads bodies.

    Args:
        limit: bytes of all bodies together, beyond the first `SMALL` of each.
        option: that says so.
        gap: seconds that a client may be silent within a body.
    """

    def __init__(self, limit: int, option: str, gap: float) -> None:
        self._limit = limit
        self._option = option
        self._gap = gap
        self.pending = 0  # bytes that count

    @asynccontextmanager
    async def read(self, request: Request, upload: asyncio.Timeout) -> AsyncGenerator[bytes]:
        """A request's body, which counts as long as the block runs.

        Raises `ApiError`: 408 for a client that falls silent, 503 where there is no room.
        `TimeoutError`: `upload`, the time for all of it, is over.
        """
        pieces: list[bytes] = []
        size = held = 0
        try:
            async with upload:
                stream = request.stream()
                while (piece := await self._next(stream)) is not None:
                    pieces.append(piece)
                    size += len(piece)
                    more = max(0, size - SMALL) - held
                    if more and self.pending + more > self._limit:
                        raise self._full()
                    self.pending += more
                    held += more
            body = b"".join(pieces)
            pieces.clear()
            yield body
        finally:
            self.pending -= held

    async def _next(self, stream: AsyncGenerator[bytes]) -> bytes | None:
        silence = asyncio.timeout(self._gap)
        try:
            async with silence:
                return await anext(stream, None)
        except TimeoutError:
            if not silence.expired():
                raise
            text = f"the body stalled: nothing of it came for {self._gap:g} seconds (body_timeout)."
            raise ApiError(408, text, headers=NO_RETRY) from None

    def _full(self) -> ApiError:
        text = (
            f"the bodies of other requests fill the {self._limit} bytes that there are for "
            f"them ({self._option})."
        )
        return ApiError(
            503, text, code="overloaded", headers={**retry_after(1.0), "connection": "close"}
        )
