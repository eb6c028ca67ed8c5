"""Locks that a thread in a loop does not keep from others, and blocks that Ctrl-C does not cut."""

import signal
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any


class FairLock:
    """Like `threading.RLock`, which a thread that steps in a loop would take again and again before
    any other wakes up.

    The thread that waits holds the turn, and none takes the lock past it: others get it after one
    step, not after hundreds.
    """

    def __init__(self) -> None:
        # Both know their thread: a signal may come when one is taken and nothing says so yet.
        self._turn = threading.RLock()
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Take it, once more if this thread has it; without `blocking` False where another thread
        has it or waits.
        """
        me = threading.get_ident()
        if self._owner != me:
            try:
                if not self._take(blocking):
                    return False
            except BaseException:  # Ctrl-C, before one of them was taken or after
                for taken in (self._lock, self._turn):
                    with suppress(RuntimeError):  # it was not
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
        with self._turn:  # which a signal cannot cut in two
            return self._lock.acquire()

    def release(self) -> None:
        """Give it back. Raises `RuntimeError` if another thread has it, or none."""
        if self._owner != threading.get_ident():
            raise RuntimeError("the lock is not this thread's to release.")
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
    """A block at whose end Ctrl-C takes effect: in the middle of a step it would leave the engine
    in an unknown state.

    The second one comes at once. Where Ctrl-C means something else than `KeyboardInterrupt`, and in
    other threads, which it does not reach, nothing is held.
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
