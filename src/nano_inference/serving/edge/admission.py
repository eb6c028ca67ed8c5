"""The queue's limit: what would wait too long is refused at once, with the time to come again."""

from collections import Counter
from collections.abc import Callable

from nano_inference.serving.client import EngineClient
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.errors import ApiError, retry_after

_MOST, _LEAST = 30.0, 0.5  # seconds that a client is told to wait


class Admission:
    """Counts samples: those that run or wait are the client's `num_samples`. Such as wait for
    weights that have not come are counted apart, so that they keep nobody out who does not.

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
        self._seconds = 1.0  # of a sample, on average over the last dozens of requests

    def require_room(self, num_samples: int = 1, version: int = 0) -> None:
        """Raises `ApiError` 429 if these samples, which want weights of this version, would make
        the queue too long.

        429 and not 503: load balancers take a server out that answers 503. A request that finds
        nothing running is let in, whatever its size: waiting would not help it.
        """
        self._look()
        if version > self._seen:
            self._require_patience(num_samples)
            return
        there = self._client.num_samples - self._num_held
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
