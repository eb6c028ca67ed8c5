"""uvicorn with its own listening and shutdown: the first signal drains, the second exits
immediately.
"""

import asyncio
import logging
import math
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from nano_inference.errors import ConfigError
from nano_inference.server.config import ServerConfig, is_loopback
from nano_inference.server.door import why_not
from nano_inference.server.http.connection import connection_class
from nano_inference.server.server import Server

log = logging.getLogger("nano_inference.server")
_uvicorn = logging.getLogger("uvicorn.error")

_OTHERS = 256  # file descriptors in addition to connections


def raise_file_limit(connections: int) -> None:
    """Raise this process's limit of open files as far as the user may. Log it if that is too
    low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHERS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.info(
            "max_connections=%d exceeds the limit of %d open files; raise it with ulimit -n.",
            connections,
            most,
        )


@contextmanager
def socket_for_its_user(path: str | None) -> Iterator[None]:
    """Restrict the socket file that uvicorn creates at `path` to its user. An existing socket file
    keeps its mode.

    Raises `OSError` if another server listens there, or if the path is another kind of file.
    """
    if path is None:
        yield
        return
    # uvicorn keeps the mode of an existing file, and makes a new file open to all
    if not Path(path).exists():
        with socket.socket(socket.AF_UNIX) as mine:
            before = os.umask(0o177)
            try:
                mine.bind(path)
            finally:
                os.umask(before)
    elif not Path(path).is_socket():
        raise FileExistsError("the file exists and is not a socket")
    elif _is_heard(path):
        raise FileExistsError("another server is listening on it")
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _is_heard(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        return True


class _Kept(logging.Filter):
    """Filter that keeps the error uvicorn logs when it cannot listen."""

    def __init__(self) -> None:
        super().__init__()
        self.problem: OSError | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record should be logged."""
        if isinstance(record.msg, OSError):
            self.problem = record.msg
            return False
        return True


@contextmanager
def _held_back() -> Iterator[_Kept]:
    """Keep uvicorn's own error line instead of logging it, while uvicorn starts to listen."""
    kept = _Kept()
    _uvicorn.addFilter(kept)
    try:
        yield kept
    finally:
        _uvicorn.removeFilter(kept)


# seconds that an idle connection is kept: longer than clients and proxies keep theirs
KEEP_ALIVE = 75
_GRACE = 3.0  # seconds after `drain_timeout` to send last replies
_GLANCE = 0.02  # seconds between checks for running requests
_RUSH = 2.0  # seconds for the engine to end after a second signal


class Runner(uvicorn.Server):
    """uvicorn server that ends as `Server` requires. `url` is known once `started`.

    Raises `ConfigError` for unreadable TLS files.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        config = server.config
        options = uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            uds=config.uds,
            http=connection_class(config.max_header_bytes, config.max_connections),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        try:
            options.load()
        except OSError as problem:  # includes ssl's errors
            raise ConfigError(
                f"tls_cert={config.tls_cert!r} and tls_key={config.tls_key!r}: {problem}"
            ) from problem
        super().__init__(options)
        self._server = server
        server.stop = self._stop
        self.url = ""
        self._last_signal = int(signal.SIGTERM)

    def _stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        """Start to listen, while the engine is still being built."""
        config = self._server.config
        raise_file_limit(config.max_connections)
        with _held_back() as kept:
            try:
                with socket_for_its_user(config.uds):
                    await super().startup(sockets)
            except (SystemExit, OSError, UnicodeError) as problem:
                self._server.lost = ConfigError(self._why_not(kept.problem or problem))
                self.should_exit = True
        if self.started:
            self.url = self._url()
            log_start(config, self.url)
            self._server.listens_at(self.url)

    def _why_not(self, problem: BaseException) -> str:
        config = self._server.config
        if config.uds is None:
            return why_not(config.host, config.port, problem)
        why = "" if isinstance(problem, SystemExit) else f": {problem}"
        return f"cannot listen on uds={config.uds!r}{why}."

    def _url(self) -> str:
        config = self._server.config
        if config.uds is not None:
            return f"unix:{config.uds}"
        port = self.servers[0].sockets[0].getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"{'https' if config.tls_cert else 'http'}://{host}:{port}"

    async def shutdown(self, sockets: Any = None) -> None:
        """Shut down: running requests get `drain_timeout`, new ones a 503. Then the socket closes
        and the engine ends.
        """
        self._server.drain()
        deadline = time.monotonic() + self._server.config.drain_timeout
        while self._server.exchanges and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(_GLANCE)
        # for other requests, such as a trainer's calls
        left = max(0.0, deadline - time.monotonic())
        self.config.timeout_graceful_shutdown = math.ceil(left + _GRACE)
        await super().shutdown(sockets)
        if (uds := self._server.config.uds) is not None:
            Path(uds).unlink(missing_ok=True)
        if self.force_exit:
            with suppress(Exception):
                await asyncio.wait_for(self._server.pool.close(), _RUSH)
            logging.shutdown()
            # a normal exit would wait for a thread in the middle of a step
            os._exit(128 + self._last_signal)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again, as uvicorn does: a drained server exits with
        code 0.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT."""
        self._last_signal = sig
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def log_start(config: ServerConfig, url: str) -> None:
    """Log that the server listens, and who may use it."""
    count = len(config.api_keys)
    keys = "no API key" if not count else "1 API key" if count == 1 else f"{count} API keys"
    without = "no admin key" if config.rl else "no admin key (its routes are off)"
    admin = "an admin key" if config.admin_key is not None else without
    log.info("listening on %s, %s, %s; loading the model.", url, keys, admin)
    if not config.api_keys and not is_loopback(config.host):
        log.warning(
            "host=%s is reachable from other machines and no API key is set: any client that "
            "reaches it can use it.",
            config.host,
        )
    if config.rl:
        log.info(
            "routes for trainers are on (vLLM, SGLang, prime-rl, PipelineRL): %s.",
            _who_may_train(config),
        )


def _who_may_train(config: ServerConfig) -> str:
    """Return who may pause the engine and change its weights."""
    if config.admin_key is not None:
        return "holders of the admin key may change the weights"
    clients = "clients with an API key" if config.api_keys else "all clients"
    if is_loopback(config.host):
        return f"{clients} on this machine, except web pages, may change the weights"
    return f"{clients} that reach {config.host} may change the weights (rl_open)"
