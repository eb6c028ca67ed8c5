"""The queue's limit: what would wait too long is refused at once, with the time to come again."""

from nano_inference.serving.client import EngineClient
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.errors import ApiError, retry_after

_MOST, _LEAST = 30.0, 0.5  # seconds that a client is told to wait


class Admission:
    """Counts samples: those that run or wait are the client's `num_samples`."""

    def __init__(self, config: ServerConfig, client: EngineClient) -> None:
        self._limit = config.max_queued_samples
        self._client = client
        self._seconds = 1.0  # of a sample, on average over the last dozens of requests

    def require_room(self, num_samples: int = 1) -> None:
        """Raises `ApiError` 429 if these samples would make the queue too long.

        429 and not 503: load balancers take a server out that answers 503. A request that finds nothing running is
        let in, whatever its size: waiting would not help it.
        """
        there = self._client.num_samples
        room = self._client.info.max_batch_size + self._limit
        if there and there + num_samples > room:
            wait = self._seconds * (there + num_samples - room) / self._client.info.max_batch_size
            raise ApiError(
                429,
                f"{there} samples run or wait already, and {num_samples} more would exceed max_queued_samples.",
                code="rate_limit_exceeded",
                headers=retry_after(min(_MOST, max(_LEAST, wait))),
            )

    def took(self, seconds: float) -> None:
        """A request has ended after so long."""
        self._seconds += (seconds - self._seconds) / 32
