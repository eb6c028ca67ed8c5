"""Routes for models: the list in OpenAI's, Anthropic's and llama.cpp's format, and llama.cpp's
routes that load and unload a model.
"""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from nano_inference.server.api.openai.models import MODEL, MODELS
from nano_inference.server.api.shared.fields import Strict, read_body
from nano_inference.server.api.shared.openapi import operation, thing
from nano_inference.server.api.shared.prompts import adapter_of
from nano_inference.server.http.replies import json_reply
from nano_inference.server.model_pool import PooledModel
from nano_inference.server.server import Server, leased, whole_body

Listed = dict[str, PooledModel]  # names of models and adapters -> the model


def listed(server: Server) -> Listed:
    """Return all names that requests may use. Raises `ApiError` 503 while the only model is being
    loaded.
    """
    pool = server.pool
    if not pool.stays_loaded:
        return {model.name: model for model in pool.models}
    served = server.require_served()
    return dict.fromkeys((*served.all_names, *served.adapters()), pool.models[0])


def status_of(model: PooledModel) -> dict[str, Any]:
    """Return the state of a model in llama.cpp's format."""
    if model.status == "unloaded" and model.failure is not None:
        return {"value": "unloaded", "failed": True}
    return {"value": model.status}


def model_row(model: PooledModel, name: str, created: float) -> dict[str, Any]:
    """Return the entry of a model or an adapter in OpenAI's format."""
    served = None if model.hosted is None else model.hosted.served
    is_adapter = served is not None and name not in served.all_names
    adapter = served.adapters().get(name) if served is not None and is_adapter else None
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "nano-inference",
        "root": model.name if adapter is None else adapter.folder or name,
        "parent": None if adapter is None else model.name,
        # unknown before the first load
        "max_model_len": None if model.info is None else model.info.max_model_len,
        "status": status_of(model),
    }


def anthropic_model_row(model: PooledModel, name: str, created: float) -> dict[str, Any]:
    """Return the entry of a model in Anthropic's format."""
    most = None if model.info is None else model.info.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(created), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": most,
        "max_tokens": most,
    }


class ModelRequest(Strict):
    """Body of `POST /models/load` and `/models/unload`."""

    model: str


_DONE = thing("success", success={"const": True})


def model_routes(router: APIRouter, server: Server) -> None:
    """Add the routes for models."""

    def row(request: Request, name: str, model: PooledModel) -> dict[str, Any]:
        make = anthropic_model_row if "anthropic-version" in request.headers else model_row
        return make(model, name, server.started)

    @router.get("/models", include_in_schema=False)  # llama.cpp's name
    @router.get(
        "/v1/models", openapi_extra=operation(None, MODELS, summary="List the served models")
    )
    async def models(request: Request) -> Response:
        rows = [row(request, *entry) for entry in listed(server).items()]
        if "anthropic-version" in request.headers:
            ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]}
            return json_reply(200, {"data": rows, "has_more": False, **ends})
        return json_reply(200, {"object": "list", "data": rows})

    @router.get(
        "/v1/models/{name:path}",
        openapi_extra=operation(None, MODEL, summary="Describe a served model"),
    )
    async def model(name: str, request: Request) -> Response:
        entry = server.pool.named(name)
        if server.pool.stays_loaded:
            adapter_of(name, server.require_served())
        return json_reply(200, row(request, name, entry))

    @router.post(
        "/models/load",
        openapi_extra=operation(ModelRequest, _DONE, summary="Load a model; needs the admin key"),
    )
    async def load(request: Request) -> Response:
        model = await _asked(request, server)
        (await leased(request, server, model)).release()
        return json_reply(200, {"success": True})

    @router.post(
        "/models/unload",
        openapi_extra=operation(
            ModelRequest,
            _DONE,
            summary="Unload a model when it is idle; needs the admin key",
        ),
    )
    async def unload(request: Request) -> Response:
        await server.pool.unload(await _asked(request, server))
        return json_reply(200, {"success": True})


async def _asked(request: Request, server: Server) -> PooledModel:
    server.lifecycle.require_open()
    async with whole_body(request, server) as body:
        name = read_body(body, ModelRequest, server.config).model
    if server.pool.stays_loaded:
        adapter_of(name, server.require_served())
    return server.pool.named(name)
