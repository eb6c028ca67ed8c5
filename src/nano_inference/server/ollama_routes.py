"""Ollama's routes that do not generate: lists of models, their description, embeddings, and the
routes that change a store of models, which this server does not have.
"""

import asyncio
import hashlib
import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from nano_inference.checkpoints.folders import gguf_of, load_spec, local_folder, weight_bytes
from nano_inference.errors import NanoInferenceError
from nano_inference.server.api.ollama.models import (
    EMBEDDED,
    ERROR,
    EmbedRequest,
    OldEmbedRequest,
    ShowRequest,
)
from nano_inference.server.api.ollama.request import keep_alive_of, served_name
from nano_inference.server.api.openai.embeddings import EmbeddingsAsked
from nano_inference.server.api.shared.fields import read_body
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.api.shared.prompts import (
    adapter_of,
    checked_prompt,
    need_tokenizer,
    require_at_most,
    require_possible_length,
)
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.errors import NO_RETRY, ApiError
from nano_inference.server.http.replies import json_reply, reply_in_pieces
from nano_inference.server.model_pool import PooledModel
from nano_inference.server.model_routes import listed
from nano_inference.server.routes import embedded
from nano_inference.server.server import Server, reading, whole_body
from nano_inference.text.tokenizer import load_tokenizer

# version of Ollama's API that these routes follow, since clients compare it
VERSION = "0.13.0"
_UNKNOWN = datetime.fromtimestamp(0, UTC)
_FOREVER = timedelta(days=100 * 365)

# route -> the action that this server does not do
REJECTED = {
    "POST /api/pull": "download",
    "POST /api/push": "upload",
    "POST /api/create": "create",
    "POST /api/copy": "copy",
    "DELETE /api/delete": "delete",
}


@dataclass(frozen=True)
class Card:
    """Description of a model, from its files.

    Attributes:
        format: Kind of its files.
        family: Architecture.
        size: Bytes of its weights. 0: unknown.
        modified: Time of its last change.
        digest: Digest of the name, size and time of its files.
        num_parameters: Number of weights. 0: unknown.
        context: Maximum tokens of the model. 0: unknown.
        quantization: Quantization, or type of its weights. Empty: unknown.
    """

    format: str = ""
    family: str = ""
    size: int = 0
    modified: datetime = _UNKNOWN
    digest: str = ""
    num_parameters: int = 0
    context: int = 0
    quantization: str = ""

    def details(self, served: Served | None) -> dict[str, Any]:
        """Return the description in Ollama's format."""
        loaded = "" if served is None else served.engine.quantization or served.engine.dtype
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else None,
            "parameter_size": _count(self.num_parameters),
            "quantization_level": loaded or self.quantization,
        }


def _count(number: int) -> str:
    if not number:
        return ""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def card_of(path: str) -> Card:
    """Return the description of a model, as far as it can be read. Call it in a thread."""
    folder = local_folder(path)
    if folder is None:  # a hub id that is not downloaded yet
        return Card(digest=hashlib.sha256(path.encode()).hexdigest())
    return _card(path, folder)


@cache
def _card(path: str, folder: Path) -> Card:
    modified = datetime.fromtimestamp((folder / "config.json").stat().st_mtime, UTC)
    size, file = weight_bytes(path) or 0, None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    about: dict[str, Any] = {}
    with suppress(NanoInferenceError):
        file = gguf_of(path)
        spec = load_spec(folder)
        from nano_inference.models.parameters.table import param_table

        count = sum(math.prod(param.shape) for param in param_table(spec))
        about = {"num_parameters": count, "context": spec.max_position}
    return Card(
        format="safetensors" if file is None else "gguf",
        family=str(config.get("model_type", "")),
        size=size,
        modified=modified,
        digest=hashlib.sha256(f"{path} {size} {modified}".encode()).hexdigest(),
        quantization=str(config.get("torch_dtype") or config.get("dtype") or ""),
        **about,
    )


def _served(model: PooledModel) -> Served | None:
    return None if model.hosted is None else model.hosted.served


async def _row(name: str, model: PooledModel) -> dict[str, Any]:
    path = model.source.path or model.name
    card = await asyncio.to_thread(card_of, path)
    return {
        "name": name,
        "model": name,
        "modified_at": card.modified.isoformat(),
        "size": card.size,
        "digest": card.digest,
        "details": card.details(_served(model)),
    }


async def _running_row(name: str, model: PooledModel) -> dict[str, Any]:
    info, left = model.info, model.expires_in
    expires = timedelta(seconds=left) if math.isfinite(left) else _FOREVER
    size = 0 if info is None else info.memory
    return await _row(name, model) | {
        "size": size,
        "size_vram": size,
        "expires_at": (datetime.now(UTC) + expires).isoformat(),
        "context_length": 0 if info is None else info.max_model_len,
    }


async def shown_model(name: str, model: PooledModel) -> dict[str, Any]:
    """Return the reply to `POST /api/show`."""
    path = model.source.path or model.name
    card, served = await asyncio.to_thread(card_of, path), _served(model)
    tokenizer = served.tokenizer if served is not None else await _tokenizer(path)
    template = None if tokenizer is None else tokenizer.chat_template
    reasons = served is not None and (
        served.chat_format.reasoning is not None or served.chat_format.in_channels
    )
    tools = template is not None and "tools" in template
    capabilities = ["completion", *["tools"] * tools, *["thinking"] * reasons]
    family = card.family or "unknown"
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "",
        "template": template or "",
        "details": card.details(served),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": card.num_parameters,
            f"{family}.context_length": served.engine.max_model_len if served else card.context,
        },
        "capabilities": capabilities,
        "modified_at": card.modified.isoformat(),
    }


async def _tokenizer(path: str) -> Any:
    with suppress(NanoInferenceError, OSError):
        folder = await asyncio.to_thread(local_folder, path)
        return None if folder is None else await asyncio.to_thread(load_tokenizer, folder)
    return None


def read_embed(body: bytes, served: Served) -> tuple[EmbeddingsAsked, EmbedRequest]:
    """Parse a body of `/api/embed`. Raises as `ApiProtocol.prepare` does."""
    request = read_body(body, EmbedRequest, served.config)
    return _embeds(request, served), request


def read_old_embed(body: bytes, served: Served) -> tuple[EmbeddingsAsked, OldEmbedRequest]:
    """Parse a body of `/api/embeddings`. Raises as `ApiProtocol.prepare` does."""
    request = read_body(body, OldEmbedRequest, served.config)
    values = {"model": request.model, "input": request.prompt, "keep_alive": request.keep_alive}
    return _embeds(EmbedRequest.model_validate(values), served), request


def _embeds(request: EmbedRequest, served: Served) -> EmbeddingsAsked:
    keep_alive_of(request.keep_alive)
    require_at_most(len(request.input), served.config.max_samples, "input", "the number of inputs")
    prompts: list[list[int]] = []
    for text in request.input:
        require_possible_length(text, served, "input")
        token_ids = need_tokenizer(served).encode(text, add_special_tokens=True)
        if request.truncate is not False:
            token_ids = token_ids[: served.engine.max_model_len]
        prompts.append(checked_prompt(token_ids, served, "input", least=0))
    return EmbeddingsAsked(prompts, adapter_of(served_name(request.model), served), False)


def ollama_routes(router: APIRouter, server: Server) -> None:
    """Add Ollama's routes that do not generate."""

    @router.get("/api/version", summary="Version of Ollama's API that is supported")
    async def version() -> Response:
        return json_reply(200, {"version": VERSION})

    @router.get("/api/tags", summary="List the models (Ollama)")
    async def tags() -> Response:
        return json_reply(200, {"models": [await _row(*each) for each in listed(server).items()]})

    @router.get("/api/ps", summary="List the loaded models (Ollama)")
    async def running() -> Response:
        loaded = [model for model in server.pool.models if model.status == "loaded"]
        return json_reply(
            200, {"models": [await _running_row(model.name, model) for model in loaded]}
        )

    @router.post(
        "/api/show",
        openapi_extra=operation(
            ShowRequest, {"type": "object"}, summary="Describe a model (Ollama)", error=ERROR
        ),
    )
    async def show(request: Request) -> Response:
        async with whole_body(request, server) as body:
            fields = read_body(body, ShowRequest, server.config)
        name = served_name(fields.model or fields.name or "")
        model = server.pool.named(name)
        if server.pool.stays_loaded:
            adapter_of(name, server.require_served())
        return json_reply(200, await shown_model(name, model))

    @router.post(
        "/api/embed",
        openapi_extra=operation(
            EmbedRequest, EMBEDDED, summary="Embed texts as unit vectors (Ollama)", error=ERROR
        ),
    )
    async def embed(request: Request) -> Response:
        began = time.perf_counter()
        async with reading(request, server, read_embed, name=served_name) as ((asked, fields), use):
            use.keep_alive = keep_alive_of(fields.keep_alive)
            rows = await embedded(request, server, use.hosted, asked)
        units = [_unit(row) for row in rows]
        body = {
            "model": fields.model,
            "embeddings": units,
            "total_duration": int((time.perf_counter() - began) * 1e9),
            "load_duration": int(use.waited * 1e9),
            "prompt_eval_count": sum(map(len, asked.prompts)),
        }
        return await reply_in_pieces(body, aside=True)

    @router.post(
        "/api/embeddings",
        openapi_extra=operation(
            OldEmbedRequest, {"type": "object"}, summary="Embed a text (old Ollama)", error=ERROR
        ),
    )
    async def old_embed(request: Request) -> Response:
        async with reading(request, server, read_old_embed, name=served_name) as (made, use):
            use.keep_alive = keep_alive_of(made[1].keep_alive)
            (row,) = await embedded(request, server, use.hosted, made[0])
        return json_reply(200, {"embedding": np.frombuffer(row, "<f4").tolist()})

    for route, action in REJECTED.items():
        method, path = route.split()
        _add_rejected(router, method, path, action)


def _unit(row: bytes) -> list[float]:
    vector = np.frombuffer(row, "<f4").astype(np.float64)
    return (vector / (np.linalg.norm(vector) or 1.0)).astype(np.float32).tolist()


def _add_rejected(router: APIRouter, method: str, path: str, action: str) -> None:
    async def reject() -> Response:
        raise ApiError(
            501,
            f"this server does not {action} models; name its models when you start it.",
            headers=NO_RETRY,
        )

    router.add_api_route(
        path, reject, methods=[method], name=path, summary=f"Rejected: does not {action} models"
    )
