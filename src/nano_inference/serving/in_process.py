"""An engine in the server's own process: its step loop is a thread, and messages are objects."""

import asyncio
import threading

from nano_inference.config import EngineConfig
from nano_inference.serving.client import EngineClient
from nano_inference.serving.messages import FromEngine, Ready, Stop, ToEngine


class InProcessClient(EngineClient):
    """Builds the engine in a thread, and steps it there."""

    def __init__(self, config: EngineConfig, max_backlog: int) -> None:
        super().__init__(max_backlog)
        self._config = config
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Build the engine."""
        from nano_inference.engine.engine import InferenceEngine  # imports torch
        from nano_inference.serving.core import EngineCore

        loop = asyncio.get_running_loop()

        def emit(message: FromEngine) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._receive, message)

        engine = await asyncio.to_thread(InferenceEngine, self._config)
        self._core = EngineCore(engine, emit)
        self._receive(Ready(self._core.info()))
        self._thread = threading.Thread(target=self._core.run, name="nano-inference steps", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Let the step loop end, and the engine go."""
        if self._thread is not None:
            self._send(Stop())
            await asyncio.to_thread(self._thread.join)
            self._core.engine.shutdown()
        self._die("the server is stopping.")

    def _send(self, message: ToEngine) -> None:
        self._core.handle(message)
