"""Deadlines: a moment by which something must have happened, and calls that may never return."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from nano_inference.errors import WeightTransferError, WeightUpdateConflict, WeightUpdateError

NICENESS = 10  # about a tenth of a core's time where decoding wants all of it
MOST = 16  # calls of `before` at a time, with those that were given up

Made = TypeVar("Made")
_places = threading.Semaphore(MOST)


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
        """The moment is past: no call waits any longer."""
        self._at = 0.0

    def check(self, what: str) -> None:
        """Raise `WeightTransferError` if the moment is past; `what` did not happen."""
        if not self.left():
            raise WeightTransferError(f"{what} within {self.seconds:g} s.")


def step_back() -> None:
    """Let the calling thread, and those that it starts (gloo's too), take only the cores that
    decoding leaves.

    There is no way back: only for threads that end soon. Nothing happens where threads have no
    priorities of their own.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def before(deadline: Deadline, make: Callable[[], Made], what: str, *, grace: float = 0.0) -> Made:
    """What `make` returns or raises, on a thread of its own, which stays behind if it hangs.

    Raises `WeightTransferError` at the deadline, or `grace` seconds later where the call usually
    keeps it and says more, and `WeightUpdateConflict` where too many such calls are under way or
    hang; `what` names the other side.
    """
    if not _places.acquire(blocking=False):
        raise WeightUpdateConflict(
            f"{MOST} peers have accepted a connection and say nothing yet; {what} has to wait."
        )
    done, given_up = threading.Event(), threading.Event()
    made: list[Made] = []
    problems: list[BaseException] = []

    def run() -> None:
        step_back()
        try:
            made.append(make())
        except BaseException as problem:
            if not given_up.is_set():
                problems.append(problem)
        finally:
            _places.release()
            done.set()

    threading.Thread(target=run, name=f"call of {what}", daemon=True).start()
    if not done.wait(deadline.at_most() + grace):
        given_up.set()
        raise WeightTransferError(
            f"{what} accepted a connection and said nothing within {deadline.seconds:g} s."
        )
    if problems:  # popped: else its frames hold it, and the sockets of what was made on the way
        raise problems.pop()
    return made[0]
