"""`serve` runs the server until it is told to stop; `running_server` runs one for the length of a `with` block."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from nano_inference.config import EngineConfig
from nano_inference.errors import NanoInferenceError
from nano_inference.serving.app import Server, build_app
from nano_inference.serving.client import EngineClient
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.in_process import InProcessClient
from nano_inference.serving.protocols.anthropic import Messages
from nano_inference.serving.protocols.interface import Protocol_
from nano_inference.serving.protocols.openai_completions import Completions

PROTOCOLS: dict[str, Protocol_] = {"/v1/completions": Completions(), "/v1/messages": Messages()}


def serve(engine: EngineConfig, config: ServerConfig) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    _uvicorn(InProcessClient(engine, config.max_backlog), config).run()


@contextmanager
def running_server(
    engine: EngineConfig | EngineClient, config: ServerConfig | None = None, *, timeout: float = 300.0
) -> Iterator[str]:
    """A server on a thread of this process; yields its URL. For tests, notebooks and examples.

    Args:
        engine: what to build, or a client of one that is not started yet.
        config: by default a free port of this machine, and the engine in this process.
        timeout: seconds that the engine may take to be built.
    """
    config = config if config is not None else ServerConfig(port=0, in_process=True)
    client = engine if isinstance(engine, EngineClient) else InProcessClient(engine, config.max_backlog)
    server = _uvicorn(client, config)
    thread = threading.Thread(target=server.run, name="nano-inference server", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise NanoInferenceError("the server did not start; its log says why.")
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://{config.host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


def _uvicorn(client: EngineClient, config: ServerConfig) -> uvicorn.Server:
    app = build_app(Server(config, client), PROTOCOLS)
    return uvicorn.Server(uvicorn.Config(app, host=config.host, port=config.port, log_config=None))
