"""`GrammarReaders`: threads that read requests which may hold a grammar, whose check may take long.

Small bodies have threads of their own, so that slow grammars, which are large, hold up no others of
them. A request that finds no thread is answered 503, and comes again.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nano_inference.server.errors import NO_RETRY, ApiError, retry_after
from nano_inference.structured.clocks import Spent, thread_clock

THREADS = 2  # of a lane
SMALL = 64 * 1024  # bytes of a body in the lane of small ones
MOST_WAITING = 128  # requests of a lane that wait for a thread
MOST_STUCK = 2  # threads of a lane beyond their limit that are replaced
WAIT = 20.0  # seconds that a request waits for a thread
GLANCE = 0.02  # seconds between two looks at a clock, at least

Made = TypeVar("Made")


class GrammarReaders:
    """Reads requests in threads.

    Args:
        limit: seconds of CPU that a request may take, from the moment its thread begins.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._small, self._large = _Lane(), _Lane()

    async def read(self, make: Callable[[], Made], size: int) -> Made:
        """What `make` makes of a body of so many bytes.

        Raises what it does, and `ApiError`: 400 if it takes too long, 503 if no thread was free.
        """
        lane = self._small if size <= SMALL else self._large
        await lane.wait_for_thread()
        job = _Job(lane, make, self._limit)
        return await job.result()


@dataclass
class _Lane:
    """Threads, and the requests that wait for one of them.

    Attributes:
        free: threads that may be started.
        num_waiting: requests.
        num_stuck: threads that were replaced, and run on.
    """

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(THREADS))
    num_waiting: int = 0
    num_stuck: int = 0

    async def wait_for_thread(self) -> None:
        """Take a thread. Raises `ApiError` 503."""
        problem = ApiError(
            503,
            "other requests with grammars keep this server busy; try again later.",
            code="overloaded",
            headers=retry_after(1.0),
        )
        if self.num_waiting >= MOST_WAITING:
            raise problem
        self.num_waiting += 1
        try:
            async with asyncio.timeout(WAIT):
                await self.free.acquire()
        except TimeoutError:
            raise problem from None
        finally:
            self.num_waiting -= 1


class _Job(Generic[Made]):
    """A request in its thread, which is started with it."""

    def __init__(self, lane: _Lane, make: Callable[[], Made], limit: float) -> None:
        self._lane, self._make, self._limit = lane, make, limit
        self._spent: Spent | None = None  # until the thread has begun
        self._is_replaced = False
        self._loop = asyncio.get_running_loop()
        self._made: asyncio.Future[Made] = self._loop.create_future()
        # it keeps no interpreter from ending
        try:
            threading.Thread(target=self._work, name="read a grammar", daemon=True).start()
        except BaseException:
            lane.free.release()
            raise

    async def result(self) -> Made:
        """Raises what it raised, and `ApiError` 400 beyond the limit."""
        while True:
            left = GLANCE if self._spent is None else max(GLANCE, self._spent.left)
            await asyncio.wait([self._made], timeout=left)
            if self._made.done():
                return self._made.result()
            if self._spent is not None and not self._spent.left:
                self._abandon()
                raise ApiError(
                    400,
                    f"the request's grammar could not be checked within {self._limit:g} seconds.",
                    headers=NO_RETRY,
                )

    def _work(self) -> None:
        self._spent = Spent(self._limit, thread_clock())
        try:
            made = self._make()
        except BaseException as problem:
            error = problem
            self._tell(lambda: self._made.set_exception(error))
        else:
            self._tell(lambda: self._made.set_result(made))

    def _tell(self, settle: Callable[[], None]) -> None:
        def end() -> None:
            if self._is_replaced:
                self._lane.num_stuck -= 1
            else:
                self._lane.free.release()
            if not self._made.done():
                settle()
                self._made.exception()  # all callers may have left

        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(end)

    def _abandon(self) -> None:
        """Its thread runs on, and another may take its place."""
        if self._lane.num_stuck < MOST_STUCK:
            self._lane.num_stuck += 1
            self._is_replaced = True
            self._lane.free.release()
