"""What is let in: while the server is open, the queue has room, and bodies fit into memory."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from nano_inference.remote.client import EngineClient
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import NO_RETRY, ApiError, retry_after

# seconds without a step or a token while there is work; a long prompt's step on a CPU takes less
STALLED = 60.0
Status = Literal["starting", "ok", "stalled", "dead", "draining"]


@dataclass
class Readiness:
    """What `/health` says, and who is let in.

    Attributes:
        client: the engine.
        restarts: whether a dead engine is replaced.
        is_ready: it has been built, and what is served is known. It stays True when the engine
            dies.
        failure: why it cannot be built.
        is_draining: the server was told to stop.
    """

    client: EngineClient
    restarts: bool = False
    is_ready: bool = False
    failure: str | None = None
    is_draining: bool = False

    @property
    def status(self) -> Status:
        """In one word."""
        if self.is_draining:
            return "draining"
        if self.failure is not None:
            return "dead"
        if not self.is_ready:
            return "starting"
        if self.client.why_dead is not None:
            return "dead"
        return "stalled" if self.client.is_silent or self.client.stalled(STALLED) else "ok"

    @property
    def is_lost(self) -> bool:
        """The engine is dead for good."""
        return self.failure is not None or (
            self.status == "dead" and not (self.restarts or self.client.restarting)
        )

    def require_ready(self) -> None:
        """For all routes but `/health`. Raises `ApiError` 503 until there is something to serve."""
        if not self.is_ready:
            if self.failure is not None:
                raise _DEAD
            state = f": {self.client.loading}" if self.client.loading else ""
            raise ApiError(
                503, f"the engine is being built{state}.", code="starting", headers=retry_after(1.0)
            )

    def require_open(self) -> None:
        """For new work. Raises `ApiError` 503."""
        if self.is_draining:
            # Another server behind the same name may take it; this one will not.
            raise ApiError(
                503, "the server is shutting down.", code="draining", headers=retry_after(1.0)
            )
        if self.status == "dead":
            if self.is_lost:
                raise _DEAD
            raise ApiError(
                503, "the engine is being restarted.", code="engine_dead", headers=retry_after(2.0)
            )


_DEAD = ApiError(503, "the engine is not running.", code="engine_dead", headers=NO_RETRY)


_MOST, _LEAST = 30.0, 0.5  # seconds that a client is told to wait


class Admission:
    """Counts samples: those that run or wait are the client's `num_samples`, and inputs of
    embeddings count like samples (`embedding`). Samples that wait for a future weight version are
    counted apart, so that they do not block others.

    Args:
        config: has the limit, which holds for either.
        client: the engine.
        newest: the newest version of the weights.
    """

    def __init__(
        self, config: ServerConfig, client: EngineClient, newest: Callable[[], int] = lambda: 0
    ) -> None:
        self._limit = config.max_queued_samples
        self._client = client
        self._newest = newest
        self._seen = 0  # what `newest` last said
        self._held: Counter[int] = Counter()  # version -> samples that wait for it
        self._num_held = 0
        self._num_inputs = 0  # of embeddings that run or wait
        self._seconds = 1.0  # of a sample, on average over the last dozens of requests

    def require_room(self, num_samples: int = 1, version: int = 0) -> None:
        """Raises `ApiError` 429 if these samples, which want weights of this version, would make
        the queue too long.

        429 and not 503: load balancers take a server out that answers 503. A request that finds
        nothing running is let in at any size: waiting would not help it.
        """
        self._look()
        if version > self._seen:
            self._require_patience(num_samples)
            return
        there = self._client.num_samples - self._num_held + self._num_inputs
        room = self._client.info.max_batch_size + self._limit
        if there > 0 and there + num_samples > room:
            wait = self._seconds * (there + num_samples - room) / self._client.info.max_batch_size
            raise ApiError(
                429,
                f"{there} samples run or wait already, and {num_samples} more would exceed "
                "max_queued_samples.",
                code="rate_limit_exceeded",
                headers=retry_after(min(_MOST, max(_LEAST, wait))),
            )

    def _require_patience(self, num_samples: int) -> None:
        if self._num_held and self._num_held + num_samples > self._limit:
            raise ApiError(
                429,
                f"{self._num_held} samples wait for weights that have not come, and {num_samples} "
                "more would exceed "
                "max_queued_samples.",
                code="rate_limit_exceeded",
                headers=retry_after(_MOST),
            )

    @contextmanager
    def embedding(self, num_inputs: int) -> Generator[None]:
        """Count these inputs of a request for embeddings while the block runs. Raises as
        `require_room`.
        """
        self.require_room(num_inputs)
        self._num_inputs += num_inputs
        try:
            yield
        finally:
            self._num_inputs -= num_inputs

    def hold(self, version: int, num_samples: int) -> None:
        """Samples were let in that want weights of this version."""
        self._look()
        if version > self._seen:
            self._held[version] += num_samples
            self._num_held += num_samples

    def let_go(self, version: int, num_samples: int) -> None:
        """They have ended."""
        num_samples = min(num_samples, self._held[version])  # none, if it has come
        self._held[version] -= num_samples
        self._num_held -= num_samples
        if not self._held[version]:
            del self._held[version]

    def _look(self) -> None:
        """What waited for versions that have come is like all others from now on."""
        if (newest := self._newest()) == self._seen:
            return
        self._seen = newest
        for version in [each for each in self._held if each <= newest]:
            self._num_held -= self._held.pop(version)

    def took(self, seconds: float) -> None:
        """A request has ended after so long."""
        self._seconds += (seconds - self._seconds) / 32


# bytes of a body that are not counted: what others hold up keeps no ordinary request out
SMALL = 64 * 1024
LARGE = 1 << 22  # bytes of a body that is put together in a thread


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
            # joining megabytes lets other threads run, and takes long
            join = b"".join
            body = await asyncio.to_thread(join, pieces) if size > LARGE else join(pieces)
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
