"""Implementation of `generate`: add requests, step until they have ended, yield their deltas."""

import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nano_inference.core.loop import EngineLoop
from nano_inference.core.sequence import Sequence
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.errors import EngineDead
from nano_inference.types import Delta, TrainingSample

if TYPE_CHECKING:
    from tqdm import tqdm

# called after every step with (finished samples, total samples, completion tokens so far)
ProgressFunction = Callable[[int, int, int], None]
Progress = ProgressFunction | bool | None

LONG = 2.0  # seconds after which a progress bar appears by default


def run(engine: SharedLoop, requests: list[Sequence], progress: Progress) -> Generator[Delta]:
    """Add requests and step until they have ended, yielding their deltas. Closing the generator
    aborts unfinished requests.

    It waits while another caller has paused the engine. Raises `InvalidRequest` if its own caller
    has paused it, at the start or between two deltas.
    """
    left = sum(request.width for request in requests)
    arrived: deque[Delta] = deque()
    dead: EngineDead | None = None
    show = progress_of(progress, left, engine.loop)
    request_ids = [request.request_id for request in requests]
    engine.require_not_paused_by_me()
    engine.open(requests, arrived.append)
    try:
        for request in requests:
            engine.enqueue(request)
        while left:
            if dead is not None:
                raise dead
            if not arrived:
                dead = _advance(engine, arrived, left)
            while arrived:
                delta = arrived.popleft()
                left -= delta.finished is not None
                yield delta
            show(left)
    finally:
        show.close()
        engine.abandon(request_ids)


def _advance(engine: SharedLoop, arrived: Collection[Delta], left: int) -> EngineDead | None:
    """Step, or wait briefly. Return the error if the step ended the engine, so that deltas in
    `arrived` can be yielded before it.

    Raises `InvalidRequest` if the consumer of the deltas, or a function that it passed, has paused
    the engine meanwhile.
    """
    if not engine.has_work():
        engine.require_not_paused_by_me()
    try:
        has_advanced = engine.advance_or_wait()
    except EngineDead as problem:
        return problem
    if not has_advanced and not arrived:
        raise RuntimeError(f"{left} samples were lost; this is a bug in the engine.")
    return None


def in_order(deltas: Iterable[Delta], request_ids: list[int]) -> list[TrainingSample]:
    """Return the finished samples of deltas, request by request in the order of `request_ids`."""
    order = {request_id: place for place, request_id in enumerate(request_ids)}

    def place_of(sample: TrainingSample) -> tuple[int, int]:
        return order[sample.request_id], sample.sample_index

    samples: list[TrainingSample] = []
    try:
        for delta in deltas:
            if delta.finished is not None:
                samples.append(delta.finished)
    except EngineDead as problem:
        problem.samples = tuple(sorted(samples, key=place_of))
        raise
    return sorted(samples, key=place_of)


def texts(engine: SharedLoop, requests: list[Sequence]) -> Iterator[tuple[int, str]]:
    """Yield (index of the request, new text) for each piece of text as it arrives."""
    places = {request.request_id: place for place, request in enumerate(requests)}
    for delta in run(engine, requests, False):
        if delta.text:
            yield places[delta.request_id], delta.text


class _Shown:
    """Progress reports of one `generate` call."""

    def __init__(
        self, report: ProgressFunction | None, bar: "tqdm[Any] | None", total: int, loop: EngineLoop
    ):
        self.report, self.bar, self.total, self.loop = report, bar, total, loop
        self.tokens_before = loop.num_completion_tokens

    def __call__(self, left: int) -> None:
        """Report after a step, with the number of unfinished samples."""
        tokens = self.loop.num_completion_tokens - self.tokens_before
        if self.report is not None:
            self.report(self.total - left, self.total, tokens)
        if self.bar is not None:
            self.bar.n = self.total - left
            elapsed = self.bar.format_dict["elapsed"]
            use = self.loop.cache.share_in_use()
            self.bar.set_postfix_str(
                f"{tokens / max(elapsed, 1e-9):,.0f} tok/s, KV {use:.0%}", refresh=False
            )
            self.bar.update(0)

    def close(self) -> None:
        """Close the progress bar."""
        if self.bar is not None:
            self.bar.close()


def progress_of(progress: Progress, total: int, loop: EngineLoop) -> _Shown:
    """Return the function that `generate` calls after every step."""
    if callable(progress):
        return _Shown(progress, None, total, loop)
    wanted = progress if progress is not None else sys.stderr.isatty()
    bar: Any = None
    if wanted:
        from tqdm import tqdm

        bar = tqdm(total=total, unit="sample", delay=0 if progress else LONG, dynamic_ncols=True)
    return _Shown(None, bar, total, loop)
