"""Where the time of a step goes, on the host."""

import time

PHASES = ("handle", "schedule", "apply", "build", "forward", "wait", "commit", "sample")


class StepClock:
    """Sums the time between laps, by the phase that ended there. A lap costs about 0.2 µs."""

    def __init__(self) -> None:
        self.nanoseconds: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._last = 0

    def start(self) -> None:
        """A step begins, or what is done between two of them."""
        self._last = time.perf_counter_ns()

    def lap(self, phase: str) -> None:
        """What ran since the last lap was this phase."""
        now = time.perf_counter_ns()
        self.nanoseconds[phase] += now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """Time in steps."""
        return sum(self.nanoseconds.values()) / 1e9

    def microseconds(self, num_steps: int) -> dict[str, float]:
        """Mean over steps, by phase."""
        return {phase: spent / 1e3 / max(num_steps, 1) for phase, spent in self.nanoseconds.items()}
