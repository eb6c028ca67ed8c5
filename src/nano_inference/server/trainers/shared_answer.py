"""`SharedAnswer`: one answer of the engine for all concurrent callers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Told = TypeVar("Told")


class SharedAnswer(Generic[Told]):
    """Answer to `question`, which is called once for all callers that arrive during the call, or
    within `fresh` seconds of its answer. If it raises, all of them get the error.

    Args:
        question: Makes an answer.
        fresh: Seconds for which an answer is reused.
    """

    def __init__(self, question: Callable[[], Awaitable[Told]], fresh: float) -> None:
        self._question = question
        self._fresh = fresh
        self._asked: asyncio.Task[Told] | None = None
        self._answered = 0.0  # time of the last answer, by the loop's clock

    async def get(self) -> Told:
        """Return the answer. Raises like `question`. Canceling one caller does not affect
        others.
        """
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
    """Retrieve the error, since all callers may have left."""
    if not asked.cancelled():
        asked.exception()
