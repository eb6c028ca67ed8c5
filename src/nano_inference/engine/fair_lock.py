"""A lock that goes round: whoever gives it back and wants it again stands behind those who wait
already.
"""

import threading


class FairLock:
    """Like `threading.RLock`, which a thread that steps in a loop would take again and again before
    any other wakes up.

    Whoever waits holds the turn, and nobody takes the lock past it: others get it after one step,
    not after hundreds.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Take it, once more if this thread has it; without `blocking` False where another thread
        has it or waits.
        """
        me = threading.get_ident()
        if self._owner != me:
            if not self._turn.acquire(blocking):
                return False
            try:
                if not self._lock.acquire(blocking):
                    return False
            finally:
                self._turn.release()
            self._owner = me
        self._depth += 1
        return True

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
