"""Transfer of a step's samples from the last pipeline stage, which draws them, to rank 0."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from nano_inference.core.apply import SampledTokens
from nano_inference.device.kept_ids import PackedRow, pack, unpacked
from nano_inference.errors import RankLost


class Samples(msgspec.Struct, tag="samples", frozen=True):
    """Samples of the next drawn step. Floats are float32 values stored as float64, bit for bit.

    Attributes:
        tokens: Samples without their masks.
        masks: Packed masks (`PackedRow`).
    """

    tokens: SampledTokens
    masks: list[PackedRow] | None = None


def to_message(tokens: SampledTokens) -> Samples:
    """Return the message for samples."""
    plain = replace(
        tokens,
        masks=None,
        top=None if tokens.top is None else [_row(*row) for row in tokens.top],
        score_best=[_row(*row) for row in tokens.score_best],
    )
    return Samples(plain, None if tokens.masks is None else [pack(row) for row in tokens.masks])


def from_message(message: Samples) -> SampledTokens:
    """Return the samples of a message."""
    masks = None if message.masks is None else unpacked(message.masks)
    return replace(message.tokens, masks=masks)


class SampleQueue:
    """Queue of samples at rank 0, filled in order by the thread that listens to the last stage.

    Args:
        timeout: Timeout in seconds of a wait for a step.
        why_lost: Function that returns the reason why no samples can arrive, or None.
        explain: Function that converts a failed wait to an error with the lost rank.
    """

    def __init__(
        self,
        timeout: float,
        why_lost: Callable[[], RankLost | None] = lambda: None,
        explain: Callable[[RankLost], RankLost] = lambda problem: problem,
    ) -> None:
        self._timeout, self._why_lost, self._explain = timeout, why_lost, explain
        self._changed = threading.Condition()
        self._come: dict[int, Samples] = {}  # received samples by number of the draw
        self._num_come = self._num_expected = 0

    def put(self, message: Samples) -> None:
        """Add the samples of the next step."""
        with self._changed:
            self._come[self._num_come] = message
            self._num_come += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting threads notice a lost rank."""
        with self._changed:
            self._changed.notify_all()

    def expect(self) -> "OnTheirWay":
        """Return the pending samples of a step that has just been announced."""
        self._num_expected += 1
        return OnTheirWay(self, self._num_expected - 1)

    def take(self, index: int) -> SampledTokens:
        """Wait for the samples of draw number `index`. Raises `RankLost`."""
        with self._changed:
            self._changed.wait_for(
                lambda: index in self._come or self._why_lost() is not None, self._timeout
            )
            message = self._come.pop(index, None)
        if message is not None:
            return from_message(message)
        lost = self._why_lost() or RankLost(
            f"the last stage sent no samples within {self._timeout:g} s."
        )
        raise self._explain(lost) from lost


class OnTheirWay:
    """Pending samples for the loop (`Pending`)."""

    def __init__(self, samples: SampleQueue, index: int) -> None:
        self._samples, self._index = samples, index

    def wait(self) -> SampledTokens:
        """Return the samples. Raises `RankLost`."""
        return self._samples.take(self._index)


def _row(token_ids: Iterable[int], logprobs: Iterable[float]) -> tuple[list[int], list[float]]:
    return list(token_ids), list(logprobs)
