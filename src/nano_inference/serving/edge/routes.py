"""Routes about the server itself: health, numbers, version, and the first one of an
administrator.
"""

from contextlib import suppress
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

import nano_inference
from nano_inference.errors import NanoInferenceError
from nano_inference.serving.edge.metrics import CONTENT_TYPE, leaked_blocks
from nano_inference.serving.edge.replies import json_reply
from nano_inference.serving.errors import ApiError
from nano_inference.serving.server import Server
from nano_inference.types import EngineStats

STATS_PATIENCE = 5.0  # seconds; the engine answers also amid a step
SCRAPE_PATIENCE = 1.0  # the same for Prometheus, which waits for ten


def server_routes(server: Server) -> APIRouter:
    """The routes."""
    router = APIRouter()
    _add_health(router, server)

    @router.get("/", summary="What there is, and where")
    async def index() -> Response:
        about = {
            "name": "nano-inference",
            "version": nano_inference.__version__,
            "status": server.lifecycle.status,
        }
        return json_reply(200, {**about, "model": server.metrics.model_name, "routes": _PLACES})

    @router.get("/version", summary="Version of the server")
    async def version() -> Response:
        return json_reply(200, {"version": nano_inference.__version__})

    @router.get("/stats", summary="The engine's counters and the queue")
    async def stats() -> Response:
        return json_reply(200, await _stats(server))

    @router.get("/metrics", summary="The same and more, for Prometheus")
    async def metrics() -> Response:
        with suppress(NanoInferenceError, ApiError):
            await _fresh_stats(server, SCRAPE_PATIENCE)
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)

    if server.config.rl:  # the dialects have one of their own
        return router

    @router.post("/flush_cache", summary="Forget cached prefixes; needs the admin key")
    async def flush_cache() -> Response:
        server.lifecycle.require_open()
        await server.client.call("flush_cache")
        return json_reply(200, {"flushed": True})

    return router


def _add_health(router: APIRouter, server: Server) -> None:
    @router.get("/health", summary="Whether the server serves; open to all")
    async def health() -> Response:
        status = server.lifecycle.status
        body: dict[str, Any] = {
            "status": status,
            "model_loaded": server.lifecycle.is_ready and status != "dead",
        }
        if status == "dead" and (reason := server.client.public_reason):
            body["reason"] = reason
        return json_reply(200 if status == "ok" else 503, body)

    @router.head("/health", include_in_schema=False)  # what some load balancers ask
    async def health_alone() -> Response:
        return await health()

    @router.get("/ping", summary="The same, for gateways that ask so")
    @router.post("/ping", include_in_schema=False)
    async def ping() -> Response:
        return await health()

    @router.get("/load", summary="Requests that are being answered")
    async def load() -> Response:
        return json_reply(200, {"server_load": len(server.exchanges)})


_PLACES = {
    "POST /v1/chat/completions": "OpenAI's chat",
    "POST /v1/completions": "OpenAI's completions",
    "POST /v1/messages": "Anthropic's messages",
    "GET /v1/models": "what is served",
    "GET /health": "whether it serves",
    "GET /metrics": "numbers for Prometheus",
    "GET /openapi.json": "all routes and their fields",
}


async def _fresh_stats(server: Server, patience: float) -> EngineStats | None:
    """Of the engine, which are its client's from now on; what it last reported if it has died, or
    hangs.
    """
    client = server.client
    if client.why_dead is None and not client.is_silent:
        with suppress(TimeoutError):  # it hangs; what it last said is better than nothing
            client.stats = await client.call("stats", timeout=patience)
    return client.stats


async def _stats(server: Server) -> dict[str, Any]:
    client = server.client
    latest = await _fresh_stats(server, STATS_PATIENCE)
    queue = {
        "num_samples": client.num_samples,
        "num_exchanges": len(server.exchanges),
        "max_batch_size": client.info.max_batch_size,
        "max_queued_samples": server.config.max_queued_samples,
    }
    engine = None
    if latest is not None:
        engine = {**asdict(latest), "kv_leaked_blocks": leaked_blocks(latest)}
    return {
        "status": server.lifecycle.status,
        "model": server.metrics.model_name,
        "engine": engine,
        "queue": queue,
    }
