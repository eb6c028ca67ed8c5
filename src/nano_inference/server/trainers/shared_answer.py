"""`SharedAnswer`: one question to the engine for all who ask it at about the same time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Told = TypeVar("Told")


class SharedAnswer(Generic[Told]):
    """Asks `question` once for all callers that come while it is being answered, and for those that
    come within `fresh` seconds of the answer. What it raises is raised to all of them.

    Args:
        question: makes an answer.
        fresh: seconds in which an answer is given again.
    """

    def __init__(self, question: Callable[[], Awaitable[Told]], fresh: float) -> None:
        self._question = question
        self._fresh = fresh
        self._asked: asyncio.Task[Told] | None = None
        self._answered = 0.0  # when, by the loop's clock

    async def get(self) -> Told:
        """The answer. Raises as `question`. A caller that is cancelled leaves the others theirs."""
        asked = self._asked
        if asked is None or (asked.done() and self._loop_time() - self._answered >= self._fresh):
            asked = self._asked = asyncio.get_running_loop().create_task(self._ask())
            asked.add_done_callback(_look_at)
        return await asyncio.shield(asked)

    async def _ask(self) -> Told:
        try:
            return await self._question()
        finally:
            self._answered = self._loop_time()

    def _loop_time(self) -> float:
        return asyncio.get_running_loop().time()


def _look_at(asked: "asyncio.Task[object]") -> None:
    """Retrieve its error: all callers may have left."""
    if not asked.cancelled():
        asked.exception()
