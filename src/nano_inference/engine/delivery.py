"""`Delivery`: hands deltas and samples to the sinks of their requests."""

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
    """Sinks by request id. One goes by itself when its request's last sample has ended."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self.broken: set[int] = set()  # requests whose sink has raised, to be aborted

    def open(self, request_id: int, num_samples: int, sink: Sink) -> None:
        """From now on `sink` takes this request's deltas, called by the thread that steps. Raises
        `InvalidRequest`.
        """
        if request_id in self._waiting:
            raise InvalidRequest(f"request id {request_id} is in use; ask for a new one.")
        self._waiting[request_id] = _Waiting(sink, num_samples)

    def abandon(self, request_ids: Iterable[int]) -> list[int]:
        """Let what is still to come of these requests go nowhere; returns those that have not
        ended.
        """
        unfinished = [request_id for request_id in request_ids if request_id in self._waiting]
        for request_id in unfinished:
            self._waiting[request_id].sink = _nowhere
        return unfinished

    def open_requests(self) -> set[int]:
        """Requests with a sink."""
        return set(self._waiting)

    def note(self, queue_times: Iterable[tuple[int, float]]) -> None:
        """How long requests waited before they were let in, for the deltas that end their
        samples.
        """
        for request_id, seconds in queue_times:
            if waiting := self._waiting.get(request_id):
                waiting.queued = seconds

    def hand_out(
        self, streamed: Iterable[Delta], samples: Iterable[TrainingSample]
    ) -> list[TrainingSample]:
        """Give each its own; returns the samples without a sink."""
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
        """Give a delta to its sink. One that raises gets no other; other requests go on."""
        try:
            waiting.sink(delta)
        except Exception as problem:
            kind = type(problem).__name__
            logger.error(
                "Request %d: its sink raised %s.", delta.request_id, kind, exc_info=problem
            )
            waiting.sink = _nowhere
            if delta.request_id in self._waiting:  # else it has ended
                self.broken.add(delta.request_id)


def _nowhere(_: Delta) -> None:
    pass
