"""What every transport is: something that yields buckets until done, before a deadline."""

import math
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple, Protocol

from nano_inference.engine.weight_update import Bucket
from nano_inference.errors import WeightTransferError, WeightUpdateError

Shapes = Mapping[str, tuple[int, ...]]  # of every tensor that an update of the model may name


class Deadline:
    """A moment by which something must have happened, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise WeightUpdateError(f"timeout={seconds} must be more than 0 seconds.")
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then; 0 afterwards."""
        return max(0.0, self._at - time.monotonic())

    def at_most(self, seconds: float = math.inf) -> float:
        """So many seconds, or `left` if that is less, and never nothing: to some calls 0 means no
        limit.
        """
        return min(seconds, max(self.left(), 0.001))

    def remaining(self) -> timedelta:
        """`at_most`, as torch takes it."""
        return timedelta(seconds=self.at_most())

    def end(self) -> None:
        """Nobody waits any longer: the moment is past."""
        self._at = 0.0

    def check(self, what: str) -> None:
        """Raise `WeightTransferError` if the moment is past; `what` did not happen."""
        if not self.left():
            raise WeightTransferError(f"{what} within {self.seconds:g} s.")


class Incoming(NamedTuple):
    """An update that begins to arrive."""

    version: int | None  # that the trainer gave it
    buckets: Iterator[Bucket]  # whoever takes a bucket owns its tensors


class WeightTransport(Protocol):
    """A way for weights to arrive. One update at a time."""

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Wait for an update to begin. Raises `WeightUpdateError`, as the buckets' iterator does.

        What the peer says is checked against `shapes`, the model's own table, before anything is
        allocated.
        """
        ...

    def close(self) -> None:
        """Tear down what is open; called from another thread while `receive` or its iterator may
        wait, or twice.

        A later `receive` starts anew.
        """
        ...
