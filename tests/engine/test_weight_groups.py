"""`Group.wait`: a collective that is late, done, or failed, whatever moment it chooses."""

from datetime import timedelta

import pytest
import torch

from nano_inference.engine.transports.group import Group
from nano_inference.engine.transports.interface import Deadline
from nano_inference.errors import WeightTransferError

CPU = torch.device("cpu")


class EndsAsTheWaitDoes:
    """A collective that is done between the end of a wait for it and the look whether it is done: as torch's do."""

    def __init__(self, failure: str | None = None) -> None:
        self.is_done, self.failure = False, failure

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.is_done:
            self.is_done = True
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self) -> bool:
        return self.is_done


def test_a_collective_that_ends_as_the_wait_for_it_does() -> None:
    Group(None, CPU).wait([EndsAsTheWaitDoes()], "'a'", Deadline(5.0))
    with pytest.raises(WeightTransferError, match="'a' did not travel, the other side is gone: connection reset"):
        Group(None, CPU).wait([EndsAsTheWaitDoes("connection reset")], "'a'", Deadline(5.0))
