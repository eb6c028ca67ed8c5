"""Deadlines, and calls that may never return."""

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

NICENESS = 10  # leaves about a tenth of a core while decoding needs all cores
MOST = 16  # concurrent calls of `before`, including abandoned ones

Made = TypeVar("Made")
_places = threading.Semaphore(MOST)


class Deadline:
    """Deadline that is `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise WeightUpdateError(f"timeout={seconds} must be more than 0 seconds.")
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Return the remaining seconds, or 0 after the deadline."""
        return max(0.0, self._at - time.monotonic())

    def at_most(self, seconds: float = math.inf) -> float:
        """Return the smaller of `seconds` and `left`, but never 0, which can mean no limit."""
        return min(seconds, max(self.left(), 0.001))

    def remaining(self) -> timedelta:
        """Return the remaining time as a timedelta for torch."""
        return timedelta(seconds=self.at_most())

    def end(self) -> None:
        """Expire now, so that no call waits any longer."""
        self._at = 0.0

    def check(self, what: str) -> None:
        """Raise `WeightTransferError` after the deadline. `what` names the missing event."""
        if not self.left():
            raise WeightTransferError(f"{what} within {self.seconds:g} s.")


def step_back() -> None:
    """Lower the priority of the calling thread, and of threads that it starts (including gloo's).

    Such threads use only the cores that decoding leaves idle. The priority cannot be raised again,
    so use this only for short-lived threads. The call has no effect on systems without thread
    priorities.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def before(deadline: Deadline, make: Callable[[], Made], what: str, *, grace: float = 0.0) -> Made:
    """Run `make` on a separate thread, which is abandoned if it hangs. Return its result or raise
    its error.

    Raises `WeightTransferError` at the deadline, or `grace` seconds later if the call usually times
    out by itself with a better message. Raises `WeightUpdateConflict` if too many such calls are
    running or hanging. `what` names the other side.
    """
    if not _places.acquire(blocking=False):
        raise WeightUpdateConflict(
            f"{MOST} peers have accepted a connection without responding; retry {what} later."
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
            f"{what} accepted a connection but did not respond within {deadline.seconds:g} s."
        )
    if problems:  # popped, because a reference from its own frames would keep sockets open
        raise problems.pop()
    return made[0]
