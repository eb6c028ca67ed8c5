"""`ProcessClient`: an engine in a process of its own, and a new one in its place if that is
wanted.
"""

import asyncio
import logging
import time

from nano_inference.config import EngineConfig
from nano_inference.errors import EngineDead, NanoInferenceError
from nano_inference.serving.backoff import Backoff
from nano_inference.serving.client import STOPPING, EngineClient, error_named
from nano_inference.serving.engine_child import STOP_PATIENCE, EngineChild
from nano_inference.serving.log_lines import LogFormat
from nano_inference.serving.messages import CannotStart, Dead, FromEngine, Ready, ToEngine

log = logging.getLogger("nano_inference.serving")


class ProcessClient(EngineClient):
    """Starts an engine process, and notices at once when it ends.

    Args:
        config: of the engine.
        max_backlog: tokens that a stream may hold, a sample, for somebody who does not read.
        restart: start a new engine when the old one has died. What the old one was doing fails all
            the same.
        log_format: of the engine process's log lines; their level is that of this process.
        number: of the engine among several; where the configuration names no device, each takes the
            next one.
        meeting: see `Begin`.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_backlog: int,
        *,
        restart: bool = False,
        log_format: LogFormat = "text",
        number: int = 0,
        meeting: str = "",
    ) -> None:
        super().__init__(max_backlog, restart=restart)
        self._config = config
        self._log_format: LogFormat = log_format
        self._number, self._meeting = number, meeting
        self._child: EngineChild | None = None
        self._started: asyncio.Future[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._backoff = Backoff()

    async def start(self) -> None:
        """Start the process and wait until its engine is ready.

        Raises what kept the engine from being built, and `EngineDead` if its process ended without
        a word.
        """
        self._started = asyncio.get_running_loop().create_future()
        try:
            self._launch()
            await self._started
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let the engine end, or end it, within seconds. Its process, sockets and folder are gone
        then.
        """
        is_ready = self._info is not None and not self.restarting
        self._restart = self.restarting = False
        if self._again is not None:
            self._again.cancel()
        self._die(STOPPING, STOPPING)
        self._settle(EngineDead(STOPPING))
        child, self._child = self._child, None
        if child is not None:
            # one that is being built does not listen yet
            await child.close(STOP_PATIENCE if is_ready else 0.0)

    def kill(self) -> None:
        """End its process at once."""
        if self._child is not None:
            self._child.kill()

    def _send(self, message: ToEngine) -> None:
        assert self._child is not None
        self._child.send(message)

    def _launch(self) -> None:
        self._child = EngineChild(
            self._config, self._hear, self._bury, self._log_format, self._number, self._meeting
        )

    def _hear(self, message: FromEngine) -> None:
        self._receive(message)
        match message:
            case Ready():
                self._backoff.ready(time.monotonic())
                self._settle(None)
            case CannotStart(error, text):
                self._settle(error_named(error, text))
            case Dead():  # its process is about to end
                self.restarting = self._restart
            case _:
                pass

    def _bury(self, reason: str) -> None:
        """The process has ended, unasked."""
        self._child = None
        self._die(reason, "its process has ended")  # unless it said itself why
        if self.on_dead is None:  # else who watches it says so
            log.error("the engine has died: %s", self._dead)
        if self._started is not None and not self._started.done():
            self._settle(EngineDead(reason))
        elif self._restart:
            delay = self._backoff.died(time.monotonic())
            self.restarting = True
            self._again = asyncio.get_running_loop().call_later(delay, self._start_again)

    def _start_again(self) -> None:
        self.num_restarts += 1
        try:
            self._launch()
        except (OSError, NanoInferenceError) as problem:
            log.error("no new engine could be started: %s", problem)
            self._bury(f"no new engine could be started: {problem}")

    def _settle(self, problem: Exception | None) -> None:
        if self._started is not None and not self._started.done():
            if problem is None:
                self._started.set_result(None)
            else:
                self._started.set_exception(problem)
