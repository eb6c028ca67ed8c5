"""`Server`: what the routes share, from the moment it listens until its engine has ended."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nano_inference.serving.client import EngineClient
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.control import Control
from nano_inference.serving.edge.admission import Admission, Bodies, Lifecycle
from nano_inference.serving.edge.logs import log_access, log_ready
from nano_inference.serving.edge.metrics import Metrics
from nano_inference.serving.edge.replies import RequestRecord
from nano_inference.serving.errors import ApiError, retry_after
from nano_inference.serving.parsing import chat_format
from nano_inference.serving.protocols.interface import Served
from nano_inference.text.tokenizer import load_tokenizer

log = logging.getLogger("nano_inference.serving")

# seconds that a server without an engine answers 503, so that it is seen to be down, before it ends
LINGER = 10.0
_GLANCE = 0.2  # seconds between two looks at the engine


@dataclass
class Server:
    """What the routes share.

    Attributes:
        config, client: as given.
        served: None until the engine is ready.
        started: `time.time()` when it was.
        stop: called when the engine is lost for good; ends the server.
        exchanges: for each exchange that runs: the function that ends it with an error.
        beside: started when the engine is ready, and cancelled at the end.
        linger: seconds between the engine's end and that call.
        lost: why the engine is lost.
    """

    config: ServerConfig
    client: EngineClient
    served: Served | None = None
    started: float = 0.0
    stop: Callable[[], None] | None = None
    exchanges: set[Callable[[ApiError], None]] = field(
        default_factory=set[Callable[[ApiError], None]]
    )
    beside: list[Callable[[], Coroutine[Any, Any, None]]] = field(
        default_factory=list[Callable[[], Coroutine[Any, Any, None]]]
    )
    linger: float = field(default_factory=lambda: LINGER)
    lost: Exception | str | None = None

    def __post_init__(self) -> None:
        self.lifecycle = Lifecycle(self.client, self.config.restart_engine)
        config = self.config
        self.bodies = Bodies(config.max_pending_bytes, "max_pending_bytes", config.body_timeout)
        self.weight_bodies = Bodies(
            config.rl_max_body_bytes, "rl_max_body_bytes", config.body_timeout
        )
        self.metrics = Metrics(self.client)
        self.control = Control(self.client, self.config)
        self.admission = Admission(config, self.client, lambda: self.control.newest_version)

    def require_served(self) -> Served:
        """What is served. Raises `ApiError` 503 before it is known."""
        if self.served is None:
            self.lifecycle.require_ready()
        assert self.served is not None
        return self.served

    def answered(self, record: RequestRecord) -> None:
        """A request has been answered: for the log and the metrics."""
        log_access(record)
        if record.status >= 400:
            self.metrics.refused(record.status, record.problem)

    def drain(self) -> None:
        """Take nothing new; what runs gets `drain_timeout` seconds. Called on the server's loop."""
        if self.lifecycle.is_draining:
            return
        self.lifecycle.is_draining = True
        log.info(
            "draining: %d request(s) get %g seconds to end.",
            len(self.exchanges),
            self.config.drain_timeout,
        )
        asyncio.get_running_loop().call_later(self.config.drain_timeout, self.end_all)

    def end_all(self) -> None:
        """Abort all that runs; clients are told, and trainers."""
        problem = ApiError(
            503, "the server is shutting down.", code="draining", headers=retry_after(1.0)
        )
        for end in list(self.exchanges):
            end(problem)
        self.client.end_calls(problem)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From before the engine's start to its end. The engine is built meanwhile, and `/health`
        answered.
        """
        life = asyncio.create_task(self._live())
        try:
            yield
        finally:
            life.cancel()
            with suppress(asyncio.CancelledError):
                await life
            await self.client.close()

    async def _live(self) -> None:
        try:
            await self.client.start()
            self.served = await asyncio.to_thread(
                serve_what, self.config, self.client, self.control
            )
        except Exception as problem:
            log.error("the engine could not be built: %s", problem)
            self.lost, self.lifecycle.failure = problem, str(problem)
            if self.stop is not None:
                self.stop()
            return
        self.started = time.time()
        self.metrics.serve(self.served.name)
        self.lifecycle.is_ready = True
        log_ready(self.config, self.served)
        tasks = [asyncio.create_task(start()) for start in self.beside]
        try:
            while not self.lifecycle.is_lost:
                await asyncio.sleep(_GLANCE)
        finally:
            for task in tasks:
                task.cancel()
        if self.lifecycle.is_draining:
            return
        self.lost = self.client.why_dead
        log.error(
            "there is no engine any more; the server ends in %g seconds: %s", self.linger, self.lost
        )
        await asyncio.sleep(self.linger)
        if self.stop is not None:
            self.stop()


def serve_what(config: ServerConfig, client: EngineClient, control: Control) -> Served:
    """What builders need to know, once the engine is ready."""
    info = client.info
    # without a tokenizer token ids are served
    folder = info.tokenizer_folder
    tokenizer = None if folder is None else load_tokenizer(Path(folder))
    if tokenizer is not None and config.chat_template is not None:
        tokenizer = replace(tokenizer, chat_template=config.chat_template)
    template = None if tokenizer is None else tokenizer.chat_template
    return Served(
        name=(*config.served_names, info.model_path)[0],
        engine=info,
        tokenizer=tokenizer,
        chat_format=chat_format(template, config.tool_format, config.reasoning_format),
        config=config,
        other_names=config.served_names[1:],
        version_name=control.version_name,
        version_number=control.version_number,
    )
