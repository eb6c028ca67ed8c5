"""`EngineStats` of a loop and what it runs on."""

import time
from typing import TYPE_CHECKING

from nano_inference.types import EngineStats

if TYPE_CHECKING:
    from nano_inference.engine.loop import EngineLoop
    from nano_inference.engine.runner import ModelRunner

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


def collect(loop: "EngineLoop", runner: "ModelRunner") -> EngineStats:
    """Counters since the engine was built, and its state now."""
    cache, sequences = loop.cache, loop.sequences
    seconds = loop.clock.seconds
    times = [(busy / 1e9, waiting / 1e9) for busy, waiting in runner.rank_times()]
    for_samples = loop.clock.nanoseconds["wait"] / 1e9  # that rank 0 waited
    return EngineStats(
        num_waiting=len(sequences.waiting),
        num_running=len(sequences.running),
        num_held=len(sequences.held),
        num_free_blocks=cache.num_free_blocks(),
        num_blocks=cache.num_blocks,
        kv_leaked_blocks=loop.num_leaked_blocks,
        kv_use=cache.share_in_use(),
        num_steps=loop.num_steps,
        num_preemptions=loop.num_preemptions,
        tokens_computed=runner.tokens_computed,
        prompt_tokens_computed=runner.prompt_tokens_computed,
        prompt_tokens_cached=loop.num_cached_tokens,
        hit_rate=loop.num_cached_tokens
        / max(loop.num_cached_tokens + runner.prompt_tokens_computed, 1),
        prompt_tokens=loop.num_prompt_tokens,
        prompt_tokens_queried=loop.num_queried_tokens,
        completion_tokens=loop.num_completion_tokens,
        tokens_per_second=loop.num_completion_tokens / seconds if seconds else 0.0,
        step_microseconds=loop.clock.microseconds(loop.num_steps),
        ranks_busy=tuple(busy for busy, _ in times),
        ranks_waiting=tuple(
            waiting + for_samples * (rank == 0) for rank, (_, waiting) in enumerate(times)
        ),
    )
