"""Engines that stand still amid their requests, or go slowly, so that what a test does to a request
comes in time, however fast or slow the machine is.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from nano_inference.core.loop import EngineLoop

LONG = 300  # tokens of a long request
SECONDS = 0.003  # that a step takes at least while one runs
DAWDLING = 0.02  # and where much is to be done meanwhile
_seconds = SECONDS


def stand_still(
    monkeypatch: "pytest.MonkeyPatch", loop: "EngineLoop", num_steps: int = 3
) -> threading.Event:
    """Let a loop compute so many steps from now on, and then only take in messages, until the event
    that is returned is set.
    """
    step, last, go_on = loop.step, loop.num_steps + num_steps, threading.Event()

    def stand() -> Any:
        if loop.num_steps < last or not loop.life.launching or go_on.is_set():
            return step()
        time.sleep(0.001)
        return loop.handle()

    monkeypatch.setattr(loop, "step", stand)
    return go_on


def slowed(step: Callable[[Any], Any], long: int = LONG) -> Callable[[Any], Any]:
    """`EngineLoop.step`, slower while a request of so many tokens runs: that lasts for a second."""

    def slow(loop: Any) -> Any:
        if any(seq.request.params.max_tokens >= long for seq in loop.sequences.running):
            time.sleep(_seconds)
        return step(loop)

    return slow


@contextmanager
def dawdling() -> Iterator[None]:
    """In engines of this process that are `slowed`, long requests get nowhere in this block."""
    global _seconds
    _seconds = DAWDLING
    try:
        yield
    finally:
        _seconds = SECONDS
