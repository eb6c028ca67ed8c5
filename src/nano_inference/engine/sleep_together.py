"""Weights of engines in lockstep sleep together, as each needs the experts of all: who waits for
whom.

An engine whose weights are to sleep stops, says so in the next round, and goes on serving the
others until all have said it. From then on nobody computes until a round in which all say that they
have their weights again.
"""

import time
from collections.abc import Callable
from typing import Protocol

from nano_inference.engine.lockstep import Lockstep
from nano_inference.errors import NanoInferenceError

SLEEP_SECONDS = 60.0  # for all engines to be asked to let their weights sleep
WAKE_SECONDS = 600.0  # for all of them to read theirs back
LOOK = 0.005  # seconds between two looks at what the others have said


class Stepping(Protocol):
    """An engine that steps, and takes part in rounds."""

    def require_alive(self) -> None:
        """Raise `EngineDead` if it is."""
        ...

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def advance(self) -> None:
        """Step."""
        ...


def sleep_with_others(lockstep: Lockstep, engine: Stepping) -> None:
    """Wait until the weights of an engine that wants to may sleep: see `Lockstep.may_sleep` for
    whether they may.
    """
    _wait(lambda: lockstep.asleep or not lockstep.sleep_wanted, engine, SLEEP_SECONDS)


def not_together() -> NanoInferenceError:
    """Why they may not."""
    return NanoInferenceError(
        "the weights of engines in lockstep sleep together, and not all of these were asked to "
        "sleep within "
        f"{SLEEP_SECONDS:g} s, or some were woken; ask all of them at once."
    )


def wake_with_others(lockstep: Lockstep, engine: Stepping) -> None:
    """Wait until all have their weights, or this one is to sleep again.

    Raises `NanoInferenceError` where others sleep on.
    """
    if not _wait(lambda: lockstep.sleep_wanted or not lockstep.asleep, engine, WAKE_SECONDS):
        raise NanoInferenceError(
            "the weights of other engines in lockstep sleep on, and this one waits for them; "
            "wake() them, and then "
            "this one again."
        )


def _wait(holds: Callable[[], bool], engine: Stepping, seconds: float) -> bool:
    """Take part in rounds until it holds; False: not in so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        engine.require_alive()
        if time.monotonic() > end:
            return False
        if engine.has_work():  # else the others' rounds, or a thread that steps, are waited for
            engine.advance()
        else:
            time.sleep(LOOK)
    return True
