"""A step's samples on their way back: the last stage of a pipeline draws them, rank 0 waits for
them.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from nano_inference.core.apply import SampledTokens
from nano_inference.device.kept_ids import PackedRow, pack, unpacked
from nano_inference.errors import RankLost


class Samples(msgspec.Struct, tag="samples", frozen=True):
    """The samples of the next step that was drawn. A float32 is a float64, bit for bit.

    Attributes:
        tokens: all but the masks.
        masks: see `PackedRow`.
    """

    tokens: SampledTokens
    masks: list[PackedRow] | None = None


def to_message(tokens: SampledTokens) -> Samples:
    """Samples as they travel."""
    plain = replace(
        tokens,
        masks=None,
        top=None if tokens.top is None else [_row(*row) for row in tokens.top],
        score_best=[_row(*row) for row in tokens.score_best],
    )
    return Samples(plain, None if tokens.masks is None else [pack(row) for row in tokens.masks])


def from_message(message: Samples) -> SampledTokens:
    """Samples as the loop takes them in."""
    masks = None if message.masks is None else unpacked(message.masks)
    return replace(message.tokens, masks=masks)


class SampleQueue:
    """Samples on their way to rank 0. The thread that listens to the last stage puts them here, in
    order.

    Args:
        timeout: seconds that a step may take, from when rank 0 begins to wait for it.
        why_lost: why nothing will come any more; None: all ranks are here.
        explain: makes of a failed wait the error that names the rank.
    """

    def __init__(
        self,
        timeout: float,
        why_lost: Callable[[], RankLost | None] = lambda: None,
        explain: Callable[[RankLost], RankLost] = lambda problem: problem,
    ) -> None:
        self._timeout, self._why_lost, self._explain = timeout, why_lost, explain
        self._changed = threading.Condition()
        self._come: dict[int, Samples] = {}  # by number of the draw
        self._num_come = self._num_expected = 0

    def put(self, message: Samples) -> None:
        """The next step's samples have come."""
        with self._changed:
            self._come[self._num_come] = message
            self._num_come += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """A rank was lost: threads that wait look again."""
        with self._changed:
            self._changed.notify_all()

    def expect(self) -> "OnTheirWay":
        """The samples of a step that was just told to draw."""
        self._num_expected += 1
        return OnTheirWay(self, self._num_expected - 1)

    def take(self, index: int) -> SampledTokens:
        """Wait for the samples of the step that was the `index`-th to draw. Raises `RankLost`."""
        with self._changed:
            self._changed.wait_for(
                lambda: index in self._come or self._why_lost() is not None, self._timeout
            )
            message = self._come.pop(index, None)
        if message is not None:
            return from_message(message)
        lost = self._why_lost() or RankLost(
            f"the last stage brought no samples within {self._timeout:g} s."
        )
        raise self._explain(lost) from lost


class OnTheirWay:
    """A `Pending` of the loop."""

    def __init__(self, samples: SampleQueue, index: int) -> None:
        self._samples, self._index = samples, index

    def wait(self) -> SampledTokens:
        """The samples. Raises `RankLost`."""
        return self._samples.take(self._index)


def _row(token_ids: Iterable[int], logprobs: Iterable[float]) -> tuple[list[int], list[float]]:
    return list(token_ids), list(logprobs)
