"""An engine in the server's own process: a thread steps it, and messages are Python objects."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from nano_inference.config import EngineConfig
from nano_inference.remote import time_limits
from nano_inference.remote.client import STOPPING, EngineClient
from nano_inference.remote.messages import FromEngine, Ready, Stop, ToEngine

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine
    from nano_inference.remote.core import EngineCore

log = logging.getLogger("nano_inference.server")


class InProcessClient(EngineClient):
    """Client that steps an engine in a thread of this process.

    Args:
        source: Configuration of the engine to build, or an engine, which stays its owner's to shut
            down.
        max_backlog: Maximum number of unread tokens of a sample.
    """

    def __init__(self, source: "EngineConfig | InferenceEngine", max_backlog: int) -> None:
        super().__init__(max_backlog)
        self._source = source
        self._core: EngineCore | None = None
        self._thread: threading.Thread | None = None
        self._heart: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Build the engine. Raises the error that prevented it."""
        loop = asyncio.get_running_loop()

        def emit(message: FromEngine) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._receive, message)

        self._core = core = await asyncio.to_thread(_build, self._source, emit)
        self._receive(Ready(core.info()))
        self._thread = threading.Thread(
            target=_run, args=(core,), name="nano-inference steps", daemon=True
        )
        self._thread.start()
        self._pulse()

    async def close(self) -> None:
        """Stop the step loop, and shut the engine down if this client built it."""
        if self._heart is not None:
            self._heart.cancel()
        self._die(STOPPING, STOPPING)
        core, thread, self._core = self._core, self._thread, None
        if core is None or thread is None:
            return
        core.handle(Stop())
        await asyncio.to_thread(thread.join, time_limits.THREAD_STOP)
        if thread.is_alive():
            log.warning("abandoning the step thread and the engine: the last step did not end")
        elif isinstance(self._source, EngineConfig):
            core.engine.shutdown()

    def _send(self, message: ToEngine) -> None:
        if self._core is not None:
            self._core.handle(message)

    def _pulse(self) -> None:
        if self._core is not None and self._dead is None:
            self._receive(self._core.heartbeat())
            self._heart = asyncio.get_running_loop().call_later(time_limits.BEAT, self._pulse)


def _build(
    source: "EngineConfig | InferenceEngine", emit: Callable[[FromEngine], None]
) -> "EngineCore":
    from nano_inference.engine.engine import InferenceEngine  # takes a second
    from nano_inference.remote.core import EngineCore

    engine = InferenceEngine(source) if isinstance(source, EngineConfig) else source
    core = EngineCore(engine, emit)
    core.prepare()
    return core


def _run(core: "EngineCore") -> None:
    try:
        core.run()
    except Exception:  # `core.run` has reported it to the client
        log.exception("the engine has failed")
