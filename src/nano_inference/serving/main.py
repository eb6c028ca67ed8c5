"""`serve`: build the server and run it until it is told to stop."""

import uvicorn

from nano_inference.config import EngineConfig
from nano_inference.serving.app import Server, build_app
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.in_process import InProcessClient
from nano_inference.serving.protocols.interface import Protocol_
from nano_inference.serving.protocols.openai_completions import Completions

PROTOCOLS: dict[str, Protocol_] = {"/v1/completions": Completions()}


def serve(engine: EngineConfig, config: ServerConfig) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    server = Server(config, InProcessClient(engine, config.max_backlog))
    app = build_app(server, PROTOCOLS)
    uvicorn.run(app, host=config.host, port=config.port, log_config=None)
