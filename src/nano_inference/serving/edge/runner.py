"""uvicorn, told how to listen, and how to end: it drains on the first signal and goes at once on the second."""

import asyncio
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from nano_inference.errors import ConfigError
from nano_inference.serving.edge.connection import connection_class
from nano_inference.serving.edge.logs import log_start
from nano_inference.serving.server import Server

log = logging.getLogger("nano_inference.serving")

KEEP_ALIVE = 75  # seconds that a connection may wait for its next request: longer than clients and proxies keep theirs
_GRACE = 3.0  # seconds for goodbyes after `drain_timeout`
_RUSH = 2.0  # seconds that the engine gets to end after a second signal


class Runner(uvicorn.Server):
    """A uvicorn that ends as `Server` says. `url` is known once `started`.

    Raises `ConfigError` for TLS files that cannot be read.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        config = server.config
        options = uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=connection_class(config.max_header_bytes),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(config.drain_timeout + _GRACE),
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        try:
            options.load()
        except OSError as problem:  # ssl's errors are among them
            raise ConfigError(f"tls_cert={config.tls_cert!r} and tls_key={config.tls_key!r}: {problem}") from problem
        super().__init__(options)
        self._server = server
        server.stop = self._stop
        self.url = ""

    def _stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        """Listen. The engine is still being built then."""
        try:
            await super().startup(sockets)
        except SystemExit:  # it has logged why
            config = self._server.config
            self._server.lost = ConfigError(f"host={config.host!r}, port={config.port}: cannot listen there.")
            self.should_exit = True
        if self.started:
            config = self._server.config
            port = self.servers[0].sockets[0].getsockname()[1]
            host = f"[{config.host}]" if ":" in config.host else config.host
            self.url = f"{'https' if config.tls_cert else 'http'}://{host}:{port}"
            log_start(config, self.url)

    async def shutdown(self, sockets: Any = None) -> None:
        """No new connections; what runs gets its time; then the engine ends."""
        self._server.drain()
        await super().shutdown(sockets)
        if self.force_exit:
            with suppress(Exception):
                await asyncio.wait_for(self._server.client.close(), _RUSH)
            logging.shutdown()
            os._exit(1)  # a thread in the middle of a step would be waited for

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn raises a signal again after it has obeyed it; a server that has drained has ended well."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
