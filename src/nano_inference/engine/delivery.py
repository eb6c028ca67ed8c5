"""Delivery: deltas and samples of a step go to the sinks of their requests."""

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nano_inference.errors import InvalidRequest
from nano_inference.scheduling.sequence import Sequence
from nano_inference.types import Delta, TrainingSample, VersionSpan

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
            self._hand(_last_delta(sample, waiting.queued), waiting)
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


def next_delta(seq: Sequence, before: int, text: str | None) -> Delta:
    """A streaming sequence's tokens from place `before` on, and what is known of them."""
    version = seq.version_starts[-1][0] if len(seq.token_ids) > before else 0
    past = seq.contexts[-1].past if version and seq.contexts else ()
    return _delta(
        seq, before - seq.request.num_prompt_tokens, seq.num_completion_tokens, text, version, past
    )


def deltas_since(seq: Sequence, told: int) -> list[Delta]:
    """A sequence's completion tokens from place `told` on, without text: a delta for each way to
    compute them.
    """
    starts = {start for _, start in seq.version_starts} | {
        context.token_start for context in seq.contexts
    }
    end = seq.num_completion_tokens
    deltas: list[Delta] = []
    for begin, stop in itertools.pairwise(
        [told, *sorted(start for start in starts if told < start < end), end]
    ):
        if begin < stop:
            version = next(
                version for version, start in reversed(seq.version_starts) if start <= begin
            )
            past = next(
                (each.past for each in reversed(seq.contexts) if each.token_start <= begin), ()
            )
            deltas.append(_delta(seq, begin, stop, None, version, past))
    return deltas


def _delta(
    seq: Sequence,
    begin: int,
    end: int,
    text: str | None,
    version: int,
    past: tuple[VersionSpan, ...],
) -> Delta:
    """A sequence's completion tokens [begin, end)."""
    first, params, new = seq.request.num_prompt_tokens, seq.request.params, slice(begin, end)
    return Delta(
        request_id=seq.request_id,
        sample_index=seq.sample_index,
        token_ids=tuple(seq.token_ids[first + begin : first + end]),
        logprobs=tuple(seq.output_logprobs[new]),
        text=text,
        top_logprobs=tuple(seq.output_top[new]) if params.top_logprobs else None,
        raw_logprobs=tuple(seq.output_raw_logprobs[new]) if params.raw_logprobs else None,
        cached_tokens=seq.cached_tokens,
        queued=seq.queued,
        log_kept_mass=tuple(seq.output_log_kept_mass[new]) if params.cuts else None,
        weight_version=version,
        past_versions=past,
    )


def _last_delta(sample: TrainingSample, queued: float) -> Delta:
    """The delta that brings a sample. Its tokens and text were in earlier ones, if those were
    wanted.
    """
    return Delta(
        request_id=sample.request_id,
        sample_index=sample.sample_index,
        token_ids=(),
        logprobs=(),
        text=None if sample.text is None else "",
        finished=sample,
        top_logprobs=None if sample.top_logprobs is None else (),
        raw_logprobs=None if sample.raw_logprobs is None else (),
        cached_tokens=sample.cached_tokens,
        queued=queued,
    )


def _nowhere(_: Delta) -> None:
    pass
