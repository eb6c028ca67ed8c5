"""`Backoff`: how long to wait before a new engine takes the place of one that has died."""

from dataclasses import dataclass

FIRST = 0.5  # seconds; doubled for each engine in a row that did not last
LONGEST = 30.0
LASTING = 60.0  # seconds after which an engine has lasted
_MOST_DOUBLINGS = 10  # by then it is the longest


@dataclass
class Backoff:
    """Of one place: when its engine was ready, and how many in a row did not last. Reads no
    clock.
    """

    _num_short: int = 0
    _ready_at: float | None = None

    def ready(self, now: float) -> None:
        """An engine serves, since this second of a monotonic clock."""
        self._ready_at = now

    def died(self, now: float) -> float:
        """It has died, or was never ready; returns seconds to wait before the next one is
        started.
        """
        lasted = self._ready_at is not None and now - self._ready_at > LASTING
        self._num_short = 0 if lasted else self._num_short + 1
        self._ready_at = None
        return min(FIRST * 2 ** min(max(0, self._num_short - 1), _MOST_DOUBLINGS), LONGEST)
