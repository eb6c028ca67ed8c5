"""`GrammarReaders`: threads that read requests with grammars, whose checks can take long.

Small bodies have their own threads, so that slow grammars, which are large, do not delay them. A
request that gets no thread in time is answered 503, and the client retries.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nano_inference.server.errors import NO_RETRY, ApiError, retry_after
from nano_inference.structured.clocks import Spent, thread_clock

THREADS = 2  # per lane
SMALL = 64 * 1024  # maximum bytes of a body in the lane for small ones
MOST_WAITING = 128  # maximum requests of a lane that wait for a thread
MOST_STUCK = 2  # maximum overdue threads of a lane that are replaced
WAIT = 20.0  # seconds that a request waits for a thread
GLANCE = 0.02  # minimum seconds between checks of a thread's CPU time

Made = TypeVar("Made")


class GrammarReaders:
    """Threads that read requests.

    Args:
        limit: Maximum CPU seconds of a request, measured from the start of its thread.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._small, self._large = _Lane(), _Lane()

    async def read(self, make: Callable[[], Made], size: int) -> Made:
        """Run `make` in a thread for a body of `size` bytes, and return its result.

        Raises its errors, and `ApiError`: 400 if it takes too long, 503 if no thread was free.
        """
        lane = self._small if size <= SMALL else self._large
        await lane.wait_for_thread()
        job = _Job(lane, make, self._limit)
        return await job.result()


@dataclass
class _Lane:
    """Threads, and the requests that wait for one.

    Attributes:
        free: Semaphore that counts the threads that may still start.
        num_waiting: Number of waiting requests.
        num_stuck: Number of replaced threads that still run.
    """

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(THREADS))
    num_waiting: int = 0
    num_stuck: int = 0

    async def wait_for_thread(self) -> None:
        """Reserve a thread. Raises `ApiError` 503."""
        problem = ApiError(
            503,
            "the server is busy with other requests that have grammars; try again later.",
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
    """A request and its thread, which the constructor starts."""

    def __init__(self, lane: _Lane, make: Callable[[], Made], limit: float) -> None:
        self._lane, self._make, self._limit = lane, make, limit
        self._spent: Spent | None = None  # None until the thread has begun
        self._is_replaced = False
        self._loop = asyncio.get_running_loop()
        self._made: asyncio.Future[Made] = self._loop.create_future()
        # a daemon, so that it does not delay the interpreter's exit
        try:
            threading.Thread(target=self._work, name="read a grammar", daemon=True).start()
        except BaseException:
            lane.free.release()
            raise

    async def result(self) -> Made:
        """Wait for the result. Raises the thread's error, and `ApiError` 400 beyond the limit."""
        while True:
            left = GLANCE if self._spent is None else max(GLANCE, self._spent.left)
            await asyncio.wait([self._made], timeout=left)
            if self._made.done():
                return self._made.result()
            if self._spent is not None and not self._spent.left:
                self._abandon()
                raise ApiError(
                    400,
                    f"checking the request's grammar took longer than {self._limit:g} seconds.",
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
                self._made.exception()  # mark it as retrieved: all callers may have left

        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(end)

    def _abandon(self) -> None:
        """Replace an overdue thread, which continues to run."""
        if self._lane.num_stuck < MOST_STUCK:
            self._lane.num_stuck += 1
            self._is_replaced = True
            self._lane.free.release()
