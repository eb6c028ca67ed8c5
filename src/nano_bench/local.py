"""The server's application, called in this process without a port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.types import ASGIApp, Message

from nano_bench.batches import Answer, Ask
from nano_inference import EngineConfig
from nano_inference.server import ServerConfig, running_app


async def _ask(app: ASGIApp, path: str, body: bytes) -> Answer:
    """Send a JSON body by POST, like a client."""
    status, headers, parts = 0, dict[str, str](), list[bytes]()
    to_come = [body]

    async def receive() -> Message:
        if not to_come:
            await asyncio.Event().wait()  # the client stays connected
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
    """Build an engine and its application, and yield a function that sends requests to it. Raises
    `NanoInferenceError` if the engine cannot be built.
    """
    async with running_app(engine, config) as app:
        yield partial(_ask, app)
