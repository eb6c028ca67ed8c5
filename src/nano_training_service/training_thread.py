"""The training thread: it does one job after the other, and lets those expire that it does not
begin in time.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nano_training_service.config import TrainServiceConfig
from nano_training_service.errors import Refused, refusal_of
from nano_training_service.futures import Future, Result


@dataclass
class Job:
    """A request for the training thread.

    Attributes:
        work: what it does there.
        undone: told of what went wrong instead, there too.
    """

    future: Future
    work: Callable[[], Result]
    undone: Callable[[str], None] | None = None
    expired: str = ""
    begun: bool = False
    timer: asyncio.TimerHandle | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def expire(self, why: str) -> None:
        """Do not begin it any more."""
        with self.lock:
            if not self.begun:
                self.expired = self.expired or why

    def finish(self, result: Result) -> None:
        """On the event loop's thread."""
        if self.timer is not None:
            self.timer.cancel()
        self.future.finish(result)

    def run(self) -> Result:
        """On the training thread. Never raises."""
        with self.lock:
            self.begun = True
        try:
            if self.expired:
                raise Refused(self.expired, 504, "server")
            return self.work()
        except BaseException as problem:
            refusal = refusal_of(problem, f"request {self.future.request_id}")
            if self.undone is not None:
                self.undone(str(refusal))
            return refusal


class TrainingThread:
    """Runs jobs in the order in which they are submitted. For the event loop's thread.

    Args:
        config: has `request_timeout`, the seconds after which a job that has not begun fails.
    """

    def __init__(self, config: TrainServiceConfig) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, "nano-inference training")

    def submit(self, job: Job) -> None:
        """Run a job behind all earlier ones."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            result = job.run()
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(job.finish, result)

        self._thread.submit(work)
        self.expire_later(job, "the training thread did not come to it")

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function behind all earlier jobs."""
        self._thread.submit(function, *arguments)

    def expire_later(self, job: Job, why: str) -> None:
        """Let a job expire for this reason, in place of any earlier reason."""
        if job.timer is not None:
            job.timer.cancel()
        seconds = self._config.request_timeout
        why = f"{why} within {seconds:g} seconds (request_timeout)."

        def expire() -> None:
            job.expire(why)
            if job.expired:
                job.finish(Refused(job.expired, 504, "server"))

        job.timer = asyncio.get_running_loop().call_later(seconds, expire)

    def shutdown(self) -> None:
        """Wait until all jobs are done, and end the thread."""
        self._thread.shutdown()
