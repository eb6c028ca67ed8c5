"""The training thread, which runs jobs in order. Jobs that do not start in time expire."""

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
        work: Function to run on the training thread.
        undone: Callback that gets the error's text if the job fails, on the training thread.
        expired: Reason why the job must not start. Empty: it may start.
    """

    future: Future
    work: Callable[[], Result]
    undone: Callable[[str], None] | None = None
    expired: str = ""
    begun: bool = False
    timer: asyncio.TimerHandle | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def expire(self, why: str) -> None:
        """Prevent the job from starting, unless it has already started."""
        with self.lock:
            if not self.begun:
                self.expired = self.expired or why

    def finish(self, result: Result) -> None:
        """Set the future's result. Call it on the event loop's thread."""
        if self.timer is not None:
            self.timer.cancel()
        self.future.finish(result)

    def run(self) -> Result:
        """Run the job on the training thread and return its result. Never raises."""
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
    """A thread that runs jobs in the order of submission. Use it from the event loop's thread.

    Args:
        config: Configuration with `request_timeout`, the seconds until a waiting job fails.
    """

    def __init__(self, config: TrainServiceConfig) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, "nano-inference training")

    def submit(self, job: Job) -> None:
        """Run a job after all earlier ones."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            result = job.run()
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(job.finish, result)

        self._thread.submit(work)
        self.expire_later(job, "the training thread did not start it")

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function after all earlier jobs."""
        self._thread.submit(function, *arguments)

    def expire_later(self, job: Job, why: str) -> None:
        """Restart a job's timeout. `why` replaces the earlier reason."""
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
        """Wait for all jobs, then end the thread."""
        self._thread.shutdown()
