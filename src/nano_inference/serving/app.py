"""The routes. What they share (keys, limits, ids, errors) is `edge/`; how requests become answers, `handler.py`."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from nano_inference.errors import ModelLoadError
from nano_inference.serving.client import EngineClient
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.errors import ApiError, api_error_of
from nano_inference.serving.handler import Generation, answer, events
from nano_inference.serving.parsing import chat_format
from nano_inference.serving.protocols import anthropic
from nano_inference.serving.protocols.interface import Protocol_, Served
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("nano_inference.serving")

LARGE = 32 * 1024  # bytes of a body that is prepared in a thread, so that others do not wait


@dataclass
class Server:
    """What the routes share."""

    config: ServerConfig
    client: EngineClient
    served: Served | None = None
    started: float = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From the engine's start to its end."""
        await self.client.start()
        self.served = serve_what(self.config, self.client)
        self.started = time.time()
        try:
            yield
        finally:
            await self.client.close()


def serve_what(config: ServerConfig, client: EngineClient) -> Served:
    """What builders need to know, once the engine is ready."""
    info = client.info
    tokenizer = _tokenizer(info.tokenizer_folder)
    template = None if tokenizer is None else tokenizer.chat_template
    return Served(
        name=config.served_model_name or info.model_path,
        engine=info,
        tokenizer=tokenizer,
        chat_format=chat_format(template, config.tool_format, config.reasoning_format),
        config=config,
    )


def _tokenizer(folder: str | None) -> Tokenizer | None:
    if folder is None:
        return None
    with suppress(ModelLoadError):
        return load_tokenizer(Path(folder))
    return None


def build_app(server: Server, protocols: Mapping[str, Protocol_]) -> FastAPI:
    """The application.

    Args:
        server: what it serves.
        protocols: path -> the protocol that a POST to it speaks.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with server.running():
            yield

    app = FastAPI(title="nano-inference", lifespan=lifespan, docs_url=None, redoc_url=None)
    for path, protocol in protocols.items():
        app.add_api_route(path, _generation_route(server, protocol), methods=["POST"])
    anthropic.add_routes(app, server)

    @app.get("/health")
    async def health() -> Response:
        return _json(200, {"status": "ok", "model_loaded": True})

    return app


def _generation_route(server: Server, protocol: Protocol_) -> Callable[[Request], Awaitable[Response]]:
    async def generate(request: Request) -> Response:
        assert server.served is not None
        request_id = "todo"
        generation: Generation | None = None
        try:
            body = await request.body()
            prepare = protocol.prepare
            if len(body) > LARGE:
                builder = await asyncio.to_thread(prepare, body, server.served, request_id)
            else:
                builder = prepare(body, server.served, request_id)
            generation = Generation(builder, server.served)
            generation.submit(server.client)
            if builder.stream:
                return await _stream(generation)
            try:
                return _json(200, await answer(generation))
            finally:
                generation.close()
        except Exception as problem:
            if generation is not None:
                generation.close()
            error = api_error_of(problem)
            if error.status == 500 and not isinstance(problem, ApiError):
                log.exception("a request failed")
            return _json(error.status, protocol.error(error, request_id), error.headers)

    return generate


async def _stream(generation: Generation) -> Response:
    source = events(generation)
    first = await anext(source)  # what is wrong with the request is raised here, before a byte is sent

    async def rest() -> AsyncIterator[bytes]:
        try:
            yield first
            async for data in source:
                yield data
        finally:
            generation.close()

    return StreamingResponse(rest(), media_type="text/event-stream")


def _json(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
