"""The server's application asked from its own process: its routes, checks and answers, and no
port.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.types import ASGIApp, Message

from nano_bench.batches import Answer, Ask
from nano_inference.config import EngineConfig
from nano_inference.server.app import build_app
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import PROTOCOLS, engine_client, raise_if_lost
from nano_inference.server.routes import embedding_routes
from nano_inference.server.server import Server

_GLANCE = 0.02  # seconds between two looks at whether the engine is built


async def _ask(app: ASGIApp, path: str, body: bytes) -> Answer:
    """POST a body of JSON as a client would."""
    status, headers, parts = 0, dict[str, str](), list[bytes]()
    to_come = [body]

    async def receive() -> Message:
        if not to_come:
            await asyncio.Event().wait()  # a client that stays
        return {"type": "http.request", "body": to_come.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update((name.decode(), text.decode()) for name, text in message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(_scope(path, body), receive, send)
    return Answer.of(status, headers, b"".join(parts))


def _scope(path: str, body: bytes) -> Message:
    length = str(len(body)).encode()
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
        "client": None,
        "server": None,
        "state": {},
    }


@asynccontextmanager
async def local_app(engine: EngineConfig, config: ServerConfig) -> AsyncIterator[Ask]:
    """What asks the application around an engine that is built, for the length of a block. Raises
    `NanoInferenceError` where it cannot be built.
    """
    server = Server(config, engine_client(engine, config))
    app = build_app(server, PROTOCOLS, (embedding_routes,))
    async with server.running():
        while not server.lifecycle.is_ready:
            raise_if_lost(server)
            await asyncio.sleep(_GLANCE)
        yield partial(_ask, app)
