"""A step's samples on their way back: the last stage of a pipeline draws them, rank 0 waits for
them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from nano_inference.engine.kept_ids import PackedIds, PackedRow, pack
from nano_inference.errors import RankLost
from nano_inference.scheduling.commit import SampledTokens

TopRow = tuple[list[int], list[float]]


class Samples(msgspec.Struct, tag="samples", frozen=True):
    """`SampledTokens`, in the order in which the steps were drawn.

    Attributes:
        token_ids: int64 [R].
        reals: float64 [3, R]: logprobs, raw logprobs, log_kept_mass. A float32 is one of them, bit
            for bit.
        scores: float64 [P].
        masks: see `PackedRow`.
        top, score_best: as in `SampledTokens`.
    """

    token_ids: bytes
    reals: bytes
    scores: bytes = b""
    masks: list[PackedRow] | None = None
    top: list[TopRow] | None = None
    score_best: list[TopRow] = []


def to_message(tokens: SampledTokens) -> Samples:
    """Samples as they travel."""
    return Samples(
        np.array(tokens.token_ids, dtype=np.int64).tobytes(),
        np.array(
            (tokens.logprobs, tokens.raw_logprobs, tokens.log_kept_mass), dtype=np.float64
        ).tobytes(),
        np.array(tokens.scores, dtype=np.float64).tobytes(),
        None if tokens.masks is None else [pack(row) for row in tokens.masks],
        None if tokens.top is None else [_row(row) for row in tokens.top],
        [_row(row) for row in tokens.score_best],
    )


def from_message(message: Samples) -> SampledTokens:
    """Samples as the loop takes them in."""
    logprobs, raw_logprobs, log_kept_mass = (
        np.frombuffer(message.reals, dtype=np.float64).reshape(3, -1).tolist()
    )
    return SampledTokens(
        token_ids=np.frombuffer(message.token_ids, dtype=np.int64).tolist(),
        logprobs=logprobs,
        raw_logprobs=raw_logprobs,
        log_kept_mass=log_kept_mass,
        masks=None if message.masks is None else PackedIds(message.masks),
        top=message.top,
        scores=np.frombuffer(message.scores, dtype=np.float64).tolist(),
        score_best=message.score_best,
    )


class SampleQueue:
    """Samples that are on their way to rank 0. Whoever listens to the last stage puts them here, in
    order.

    Args:
        timeout: seconds that a step may take, from when rank 0 begins to wait for it.
        why_lost: why nothing will come any more; None: all ranks are here.
    """

    def __init__(
        self, timeout: float, why_lost: Callable[[], RankLost | None] = lambda: None
    ) -> None:
        self._timeout, self._why_lost = timeout, why_lost
        self._changed = threading.Condition()
        self._come: deque[Samples] = deque()
        self._num_taken = self._num_expected = 0
        self._early: dict[int, SampledTokens] = {}  # of steps that nobody waited for yet

    def put(self, message: Samples) -> None:
        """The next step's samples have come."""
        with self._changed:
            self._come.append(message)
            self._changed.notify_all()

    def wake(self) -> None:
        """A rank was lost: whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()

    def expect(self) -> "OnTheirWay":
        """The samples of a step that was just told to draw."""
        self._num_expected += 1
        return OnTheirWay(self, self._num_expected - 1)

    def take(self, index: int) -> SampledTokens:
        """Wait for the samples of the step that was the `index`-th to draw. Raises `RankLost`."""
        end = time.monotonic() + self._timeout
        while index not in self._early:
            with self._changed:
                while not self._come:
                    lost = self._why_lost()
                    if lost is not None:
                        raise lost
                    if (
                        not self._changed.wait(max(end - time.monotonic(), 0.0))
                        and time.monotonic() >= end
                    ):
                        raise RankLost(
                            f"the last stage brought no samples within {self._timeout:g} s."
                        )
                message = self._come.popleft()
            self._early[self._num_taken] = from_message(message)
            self._num_taken += 1
        return self._early.pop(index)


class OnTheirWay:
    """A `Pending` of the loop."""

    def __init__(self, samples: SampleQueue, index: int) -> None:
        self._samples, self._index = samples, index

    def wait(self) -> SampledTokens:
        """The samples. Raises `RankLost`."""
        return self._samples.take(self._index)


def _row(row: tuple[Iterable[int], Iterable[float]]) -> TopRow:
    ids, values = row
    return list(ids), list(values)
