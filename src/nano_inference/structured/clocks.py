"""Clocks of another thread's or process's work, so that limits also hold on a busy machine."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

Clock = Callable[[], float]  # seconds of work so far

# A limit is also reached after this many times its seconds of wall time, because work that sleeps
# or hangs takes no CPU time.
PATIENCE = 15.0


class Spent:
    """Remainder of a limit on work.

    Args:
        limit: Seconds of work.
        clock: Clock of the working thread or process; None: count the wall clock's seconds.
        wall: Wall clock, in seconds.
    """

    def __init__(self, limit: float, clock: Clock | None, wall: Clock = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock or wall
        self._wall = wall
        self._begun, self._began = self._clock(), wall()

    @property
    def left(self) -> float:
        """Least number of seconds before the limit can be reached. Check again after that."""
        work = self._limit - (self._clock() - self._begun)
        patience = PATIENCE * self._limit - (self._wall() - self._began)
        return max(0.0, min(work, patience))


def thread_clock() -> Clock | None:
    """Return a clock of the calling thread's CPU time that other threads may read, or None if the
    system has no such clock.
    """
    clock_id_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_id_of is None:
        return None
    clock_id: int = clock_id_of(threading.get_ident())
    last = 0.0

    def read() -> float:
        nonlocal last
        with suppress(OSError):  # the thread has ended
            last = time.clock_gettime(clock_id)
        return last

    return read


def process_clock(pid: int) -> Clock | None:
    """Return a clock of the CPU time since now of the process's busiest thread, or None if the
    system does not report it. On an idle machine this clock agrees with the wall clock.
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
        except psutil.Error:  # the process has ended
            pass
        return last

    return read
