"""Where a rank's time goes: into its own work, or into waiting for another stage."""

import time


class RankClock:
    """Nanoseconds on the host since the rank was built. One thread writes.

    Attributes:
        busy: in its part of steps.
        waiting: in steps, for what another stage computes.
    """

    __slots__ = ("busy", "waiting")

    def __init__(self) -> None:
        self.busy = self.waiting = 0

    def begin(self) -> int:
        """A piece of work begins; give what this returns to `end`."""
        return time.perf_counter_ns() - self.waiting

    def end(self, mark: int) -> None:
        """It has ended. What was waited meanwhile was no work."""
        self.busy += time.perf_counter_ns() - self.waiting - mark

    def waited(self, since: int) -> None:
        """A wait has ended that began at this `time.perf_counter_ns`."""
        self.waiting += time.perf_counter_ns() - since
