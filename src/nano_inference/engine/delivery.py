"""`Delivery`: passes deltas and samples to the sinks of their requests."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nano_inference.core.deltas import last_delta
from nano_inference.errors import InvalidRequest
from nano_inference.types import Delta, TrainingSample

logger = logging.getLogger("nano_inference")

Sink = Callable[[Delta], None]


@dataclass(slots=True)
class _Waiting:
    sink: Sink
    samples_left: int
    queued: float = 0.0


class Delivery:
    """Sinks by request id. A sink is removed when the last sample of its request has ended."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self.broken: set[int] = set()  # requests to abort, because their sink raised

    def open(self, request_id: int, num_samples: int, sink: Sink) -> None:
        """Send the deltas of a request to `sink`, called by the stepping thread. Raises
        `InvalidRequest`.
        """
        if request_id in self._waiting:
            raise InvalidRequest(f"request id {request_id} is in use; pass another id.")
        self._waiting[request_id] = _Waiting(sink, num_samples)

    def abandon(self, request_ids: Iterable[int]) -> list[int]:
        """Discard all further deltas of these requests. Return the requests that have not ended."""
        unfinished = [request_id for request_id in request_ids if request_id in self._waiting]
        for request_id in unfinished:
            self._waiting[request_id].sink = _nowhere
        return unfinished

    def open_requests(self) -> set[int]:
        """Return the requests that have a sink."""
        return set(self._waiting)

    def note(self, queue_times: Iterable[tuple[int, float]]) -> None:
        """Record how long requests were queued, for the last deltas of their samples."""
        for request_id, seconds in queue_times:
            if waiting := self._waiting.get(request_id):
                waiting.queued = seconds

    def hand_out(
        self, streamed: Iterable[Delta], samples: Iterable[TrainingSample]
    ) -> list[TrainingSample]:
        """Pass deltas and samples to their sinks. Return the samples of requests without a sink."""
        for delta in streamed:
            if waiting := self._waiting.get(delta.request_id):
                self._hand(delta, waiting)
        unclaimed: list[TrainingSample] = []
        for sample in samples:
            waiting = self._waiting.get(sample.request_id)
            if waiting is None:
                unclaimed.append(sample)
                continue
            waiting.samples_left -= 1
            if not waiting.samples_left:
                del self._waiting[sample.request_id]
            self._hand(last_delta(sample, waiting.queued), waiting)
        return unclaimed

    def _hand(self, delta: Delta, waiting: _Waiting) -> None:
        """Pass a delta to its sink. A sink that raises is not called again. Other requests
        continue.
        """
        try:
            waiting.sink(delta)
        except Exception as problem:
            kind = type(problem).__name__
            logger.error(
                "The sink of request %d raised %s.", delta.request_id, kind, exc_info=problem
            )
            waiting.sink = _nowhere
            if delta.request_id in self._waiting:  # otherwise it has already ended
                self.broken.add(delta.request_id)


def _nowhere(_: Delta) -> None:
    pass
