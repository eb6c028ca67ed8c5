"""Engines that stop or slow down amid their requests, so that a test's action comes in time on any
machine.
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
SECONDS = 0.003  # seconds that a step takes at least during one
DAWDLING = 0.02  # and during an action that takes longer
_seconds = SECONDS


def stand_still(
    monkeypatch: "pytest.MonkeyPatch", loop: "EngineLoop", num_steps: int = 3
) -> threading.Event:
    """Let a loop compute a number of steps, then only read messages until the returned event is
    set.
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
    """Return an `EngineLoop.step` that is slower during a long request, which then lasts for a
    second.
    """

    def slow(loop: Any) -> Any:
        if any(seq.request.params.max_tokens >= long for seq in loop.sequences.running):
            time.sleep(_seconds)
        return step(loop)

    return slow


@contextmanager
def dawdling() -> Iterator[None]:
    """Stop the progress of long requests in `slowed` engines of this process within this block."""
    global _seconds
    _seconds = DAWDLING
    try:
        yield
    finally:
        _seconds = SECONDS
