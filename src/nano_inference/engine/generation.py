"""`generate`, seen from inside: add requests, step until they have ended, hand out their deltas."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator

from nano_inference.engine.progress import Progress, progress_of
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.scheduling.sequence import Sequence
from nano_inference.types import Delta, TrainingSample

PATIENCE = 0.5  # seconds between two looks at an engine that is paused


def run(engine: SharedLoop, requests: list[Sequence], progress: Progress) -> Generator[Delta]:
    """Add requests and step until they have ended, yielding their deltas. Closing it aborts what is
    left.

    While another thread has paused the engine it waits.
    """
    left = sum(request.width for request in requests)
    arrived: deque[Delta] = deque()
    show = progress_of(progress, left, engine.loop)
    request_ids = [request.request_id for request in requests]
    engine.open(requests, arrived.append)
    try:
        for request in requests:
            engine.enqueue(request)
        while left:
            if not arrived and not engine.advance_or_wait(PATIENCE) and not arrived:
                raise RuntimeError(f"{left} samples were lost: a bug of the engine.")
            while arrived:
                delta = arrived.popleft()
                left -= delta.finished is not None
                yield delta
            show(left)
    finally:
        show.close()
        engine.abandon(request_ids)


def in_order(deltas: Iterable[Delta], request_ids: list[int]) -> list[TrainingSample]:
    """The samples that deltas end with: request by request, as these ids have them."""
    order = {request_id: place for place, request_id in enumerate(request_ids)}
    samples = [delta.finished for delta in deltas if delta.finished is not None]
    return sorted(samples, key=lambda sample: (order[sample.request_id], sample.sample_index))


def texts(engine: SharedLoop, requests: list[Sequence]) -> Iterator[tuple[int, str]]:
    """New text of requests as it comes, with the place of its request among them."""
    places = {request.request_id: place for place, request in enumerate(requests)}
    for delta in run(engine, requests, False):
        if delta.text:
            yield places[delta.request_id], delta.text
