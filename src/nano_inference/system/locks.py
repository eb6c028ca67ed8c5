"""Fair reentrant lock, and blocks that Ctrl-C does not interrupt."""

import signal
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any


class FairLock:
    """Fair reentrant lock. With `threading.RLock`, a thread that steps in a loop would reacquire
    the lock before any waiting thread wakes up.

    A waiting thread holds the turn, and no other thread takes the lock before it. It therefore
    waits for one step, not for hundreds.
    """

    def __init__(self) -> None:
        # Both record their owner, because a signal may arrive after one is taken and before
        # `_owner` is set.
        self._turn = threading.RLock()
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock, again if this thread has it. Without `blocking`, return False if
        another thread has it or waits for it.
        """
        me = threading.get_ident()
        if self._owner != me:
            try:
                if not self._take(blocking):
                    return False
            except BaseException:  # Ctrl-C, before or after one of the locks was taken
                for taken in (self._lock, self._turn):
                    with suppress(RuntimeError):  # not taken
                        taken.release()
                raise
            self._owner = me
        self._depth += 1
        return True

    def _take(self, blocking: bool) -> bool:
        if not blocking:
            if not self._turn.acquire(blocking=False):
                return False
            try:
                return self._lock.acquire(blocking=False)
            finally:
                self._turn.release()
        with self._turn:  # a signal cannot interrupt between acquire and the block
            return self._lock.acquire()

    def release(self) -> None:
        """Release the lock. Raises `RuntimeError` if this thread does not have it."""
        if self._owner != threading.get_ident():
            raise RuntimeError("this thread does not hold the lock; only its owner can release it.")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> "FairLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class HeldInterrupts:
    """Context manager that delays Ctrl-C until the end of its block. An interrupt in the middle of
    a step would leave the engine in an unknown state.

    A second Ctrl-C takes effect immediately. Nothing is delayed in other threads, because Ctrl-C
    reaches only the main one, or if the handler is not Python's default.
    """

    def __enter__(self) -> "HeldInterrupts":
        self._came, self._before = False, None
        ordinary = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ordinary and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._came and kind is None:
                raise KeyboardInterrupt

    def _note(self, *_: Any) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
