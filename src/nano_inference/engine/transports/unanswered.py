"""`before`: a call that may never return, ended by a deadline. Its thread stays behind; there may
be few of those.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from nano_inference.engine.transports.background import step_back
from nano_inference.engine.transports.interface import Deadline
from nano_inference.errors import WeightTransferError, WeightUpdateConflict

Made = TypeVar("Made")

MOST = 16  # calls at a time, with those that were given up
_places = threading.Semaphore(MOST)


class _Call(Generic[Made]):
    """What came of it."""

    made: Made | None = None
    problem: BaseException | None = None
    is_awaited = True

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self.done = threading.Event()

    def run(self) -> None:
        """On its thread."""
        step_back()
        try:
            self.made = self._make()
        except BaseException as problem:
            if self.is_awaited:
                self.problem = problem
        finally:
            _places.release()
            self.done.set()


def before(deadline: Deadline, make: Callable[[], Made], what: str, *, grace: float = 0.0) -> Made:
    """What `make` returns or raises.

    Raises `WeightTransferError` at the deadline, or `grace` seconds later where the call usually
    keeps it and says more, and `WeightUpdateConflict` where too many such calls are under way or
    hang; `what` names the other side.
    """
    if not _places.acquire(blocking=False):
        raise WeightUpdateConflict(
            f"{MOST} peers have accepted a connection and say nothing yet; {what} has to wait."
        )
    call = _Call(make)
    threading.Thread(target=call.run, name=f"call of {what}", daemon=True).start()
    if not call.done.wait(deadline.at_most() + grace):
        call.is_awaited = False
        raise WeightTransferError(
            f"{what} accepted a connection and said nothing within {deadline.seconds:g} s."
        )
    problem, call.problem = call.problem, None
    if problem is not None:
        try:
            raise problem
        finally:
            del problem  # else its frames hold it, and the sockets of what was made on the way
    assert call.made is not None
    return call.made
