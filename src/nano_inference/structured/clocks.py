"""Clocks of work that another thread or process does: limits hold on a busy machine too."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

Clock = Callable[[], float]  # seconds of work so far

# A limit is also reached where so many times its seconds have passed by the wall clock: what
# sleeps or hangs does no work.
PATIENCE = 15.0


class Spent:
    """What is left of a limit of work.

    Args:
        limit: seconds of work.
        clock: of who works; None: the system has none, and the wall clock's seconds count.
        wall: seconds of the wall clock.
    """

    def __init__(self, limit: float, clock: Clock | None, wall: Clock = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock or wall
        self._wall = wall
        self._begun, self._began = self._clock(), wall()

    @property
    def left(self) -> float:
        """Seconds that the work may go on, at least: look again when they have passed."""
        work = self._limit - (self._clock() - self._begun)
        patience = PATIENCE * self._limit - (self._wall() - self._began)
        return max(0.0, min(work, patience))


def thread_clock() -> Clock | None:
    """CPU time of the thread that calls this, for others to read; None: this system does not tell
    it.
    """
    clock_id_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_id_of is None:
        return None
    clock_id: int = clock_id_of(threading.get_ident())
    last = 0.0

    def read() -> float:
        nonlocal last
        with suppress(OSError):  # it has ended
            last = time.clock_gettime(clock_id)
        return last

    return read


def process_clock(pid: int) -> Clock | None:
    """CPU time of the thread of a process that has worked most since now: it is that of the wall on
    a machine that has nothing else to do. None: this system does not tell it.
    """
    process = psutil.Process(pid)
    try:
        begun = {each.id: each.user_time + each.system_time for each in process.threads()}
    except psutil.Error:
        return None
    last = 0.0

    def read() -> float:
        nonlocal last
        try:
            times = [
                each.user_time + each.system_time - begun.get(each.id, 0.0)
                for each in process.threads()
            ]
            last = max(times, default=last)
        except psutil.Error:  # it has ended
            pass
        return last

    return read
