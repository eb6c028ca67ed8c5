"""Routes about the server itself: health, numbers, version, and the first one of an administrator."""

from contextlib import suppress
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

import nano_inference
from nano_inference.serving.edge.metrics import CONTENT_TYPE, leaked_blocks
from nano_inference.serving.edge.replies import json_reply
from nano_inference.serving.server import Server

STATS_PATIENCE = 5.0  # seconds; the engine answers also amid a step


def server_routes(server: Server) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/health", summary="Whether the server serves; open to all")
    async def health() -> Response:
        status = server.lifecycle.status
        body: dict[str, Any] = {"status": status, "model_loaded": server.lifecycle.is_ready and status != "dead"}
        if status == "dead" and (reason := server.client.public_reason):
            body["reason"] = reason
        return json_reply(200 if status == "ok" else 503, body)

    @router.head("/health", include_in_schema=False)  # what some load balancers ask
    async def health_alone() -> Response:
        return await health()

    @router.get("/version", summary="Version of the server")
    async def version() -> Response:
        return json_reply(200, {"version": nano_inference.__version__})

    @router.get("/stats", summary="The engine's counters and the queue")
    async def stats() -> Response:
        return json_reply(200, await _stats(server))

    @router.get("/metrics", summary="The same and more, for Prometheus")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)

    if server.config.rl:  # the dialects have one of their own
        return router

    @router.post("/flush_cache", summary="Forget cached prefixes; needs the admin key")
    async def flush_cache() -> Response:
        server.lifecycle.require_open()
        await server.client.call("flush_cache")
        return json_reply(200, {"flushed": True})

    return router


async def _stats(server: Server) -> dict[str, Any]:
    """Fresh from the engine; what it last reported if it has died, or hangs."""
    client = server.client
    latest = client.stats
    if client.why_dead is None:
        with suppress(TimeoutError):  # it hangs; what it last said is better than nothing
            latest = await client.call("stats", timeout=STATS_PATIENCE)
    queue = {
        "num_samples": client.num_samples,
        "num_exchanges": len(server.exchanges),
        "max_batch_size": client.info.max_batch_size,
        "max_queued_samples": server.config.max_queued_samples,
    }
    engine = None
    if latest is not None:
        engine = {**asdict(latest), "kv_leaked_blocks": leaked_blocks(latest)}
    return {"status": server.lifecycle.status, "model": server.metrics.model_name, "engine": engine, "queue": queue}
