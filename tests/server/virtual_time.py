"""An event loop with a virtual clock that jumps to the next timer when no work is left: waits have
exact lengths on any machine and take no time.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumping(selectors.DefaultSelector):
    """Selector that records the time until the next timer instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else 0)
        if timeout and not events:
            self.now += timeout
        return events


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that waits only for timers, like `asyncio.run`."""

    def make() -> asyncio.AbstractEventLoop:
        selector = _Jumping()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now
        return loop

    with asyncio.Runner(loop_factory=make) as runner:
        return runner.run(coroutine)
