"""Admission of requests: the server must be open, and queue and memory must have room."""

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

# Seconds without a step or a token while there is work. Even long prompts on a CPU step faster.
STALLED = 60.0
Status = Literal["starting", "ok", "stalled", "dead", "draining"]


@dataclass
class Readiness:
    """State of one engine for admission.

    Attributes:
        client: Client of the engine.
        restarts: True if a dead engine is replaced.
        is_ready: True once the engine has been built and the served model is known. It stays True
            if the engine dies.
        failure: Reason why the engine cannot be built.
    """

    client: EngineClient
    restarts: bool = False
    is_ready: bool = False
    failure: str | None = None

    @property
    def status(self) -> Status:
        """Status of the engine in one word."""
        if self.failure is not None:
            return "dead"
        if not self.is_ready:
            return "starting"
        if self.client.why_dead is not None:
            return "dead"
        return "stalled" if self.client.is_silent or self.client.stalled(STALLED) else "ok"

    @property
    def is_lost(self) -> bool:
        """True if the engine is dead and will not be replaced."""
        return self.failure is not None or (
            self.status == "dead" and not (self.restarts or self.client.restarting)
        )

    def require_ready(self) -> None:
        """Raise `ApiError` 503 until the engine is built."""
        if not self.is_ready:
            if self.failure is not None:
                raise _DEAD
            state = f": {self.client.loading}" if self.client.loading else ""
            raise ApiError(
                503, f"the engine is being built{state}.", code="starting", headers=retry_after(1.0)
            )

    def require_alive(self) -> None:
        """Raise `ApiError` 503 if the engine is dead."""
        if self.status == "dead":
            if self.is_lost:
                raise _DEAD
            raise ApiError(
                503, "the engine is restarting.", code="engine_dead", headers=retry_after(2.0)
            )


_DEAD = ApiError(503, "the engine is not running.", code="engine_dead", headers=NO_RETRY)


_MOST, _LEAST = 30.0, 0.5  # bounds of retry-after in seconds


class Admission:
    """Limit of queued samples.

    The client's `num_samples` counts running and waiting samples. Inputs of embeddings count like
    samples (`embedding`). Samples that wait for a future weight version are counted separately, so
    that they do not block others.

    Args:
        config: Configuration with the limit, which applies to each of the two counts.
        client: Client of the engine.
        newest: Returns the newest weight version.
    """

    def __init__(
        self, config: ServerConfig, client: EngineClient, newest: Callable[[], int] = lambda: 0
    ) -> None:
        self._limit = config.max_queued_samples
        self._client = client
        self._newest = newest
        self._seen = 0  # last result of `newest`
        self._held: Counter[int] = Counter()  # weight version -> samples that wait for it
        self._num_held = 0
        self._num_inputs = 0  # running and waiting inputs of embeddings
        self._seconds = 1.0  # per sample, as a moving average over recent requests

    def require_room(self, num_samples: int = 1, version: int = 0) -> None:
        """Raise `ApiError` 429 if the queue has no room for these samples, which need this weight
        version.

        The status is 429, because load balancers stop using a server that answers 503. A request of
        any size is admitted if nothing is running, since waiting would not help it.
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
                f"{there} samples are already running or waiting; {num_samples} more would exceed "
                "max_queued_samples.",
                code="rate_limit_exceeded",
                headers=retry_after(min(_MOST, max(_LEAST, wait))),
            )

    def _require_patience(self, num_samples: int) -> None:
        if self._num_held and self._num_held + num_samples > self._limit:
            raise ApiError(
                429,
                f"{self._num_held} samples already wait for future weights; {num_samples} "
                "more would exceed max_queued_samples.",
                code="rate_limit_exceeded",
                headers=retry_after(_MOST),
            )

    @contextmanager
    def embedding(self, num_inputs: int) -> Generator[None]:
        """Count a request's inputs of embeddings while the block runs. Raises like
        `require_room`.
        """
        self.require_room(num_inputs)
        self._num_inputs += num_inputs
        try:
            yield
        finally:
            self._num_inputs -= num_inputs

    def hold(self, version: int, num_samples: int) -> None:
        """Count admitted samples that wait for this weight version."""
        self._look()
        if version > self._seen:
            self._held[version] += num_samples
            self._num_held += num_samples

    def let_go(self, version: int, num_samples: int) -> None:
        """Stop counting samples that have ended."""
        num_samples = min(num_samples, self._held[version])  # 0 if the version has arrived
        self._held[version] -= num_samples
        self._num_held -= num_samples
        if not self._held[version]:
            del self._held[version]

    def _look(self) -> None:
        """Treat samples whose weight version has arrived like all others."""
        if (newest := self._newest()) == self._seen:
            return
        self._seen = newest
        for version in [arrived for arrived in self._held if arrived <= newest]:
            self._num_held -= self._held.pop(version)

    def took(self, seconds: float) -> None:
        """Record the duration of a request."""
        self._seconds += (seconds - self._seconds) / 32


# uncounted bytes of each body, so that large uploads do not block ordinary requests
SMALL = 64 * 1024
LARGE = 1 << 22  # bytes; larger bodies are joined in a thread


class Bodies:
    """Reader of bodies that limits their total size.

    Args:
        limit: Maximum bytes of all bodies together, without the first `SMALL` of each.
        option: Name of the option that sets the limit.
        gap: Maximum seconds between two parts of a body.
    """

    def __init__(self, limit: int, option: str, gap: float) -> None:
        self._limit = limit
        self._option = option
        self._gap = gap
        self.pending = 0  # counted bytes

    @asynccontextmanager
    async def read(self, request: Request, upload: asyncio.Timeout) -> AsyncGenerator[bytes]:
        """Yield a request's body, which counts while the block runs.

        Raises `ApiError`: 408 if the client stalls, 503 if there is no room. Raises `TimeoutError`
        if `upload`, the deadline of the whole body, passes.
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
            # joining megabytes takes long, and releases the GIL
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
            text = f"the body stalled: no data for {self._gap:g} seconds (body_timeout)."
            raise ApiError(408, text, headers=NO_RETRY) from None

    def _full(self) -> ApiError:
        text = (
            f"other requests' bodies fill the limit of {self._limit} bytes ({self._option}); "
            "try again later."
        )
        return ApiError(
            503, text, code="overloaded", headers={**retry_after(1.0), "connection": "close"}
        )
