"""Routes that do not generate: health, statistics, tokens, embeddings and the fleet."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.requests import ClientDisconnect

import nano_inference
from nano_inference.errors import NanoInferenceError
from nano_inference.remote.client import EngineClient
from nano_inference.remote.status import BUCKETS, FleetReport
from nano_inference.server.api.anthropic import answer as anthropic
from nano_inference.server.api.anthropic import models as anthropic_models
from nano_inference.server.api.openai.chat_request import chat_prompt
from nano_inference.server.api.openai.embeddings import (
    EMBEDDINGS,
    EmbeddingsAsked,
    EmbeddingsRequest,
    read_embeddings,
)
from nano_inference.server.api.openai.models import (
    TEXT,
    TOKENS,
    ChatTemplateFields,
    Message,
)
from nano_inference.server.api.shared.fields import Strict, TokenIds, read_body
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.api.shared.prompts import (
    adapter_of,
    need_tokenizer,
    require_possible_length,
)
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.errors import ApiError, bad_request
from nano_inference.server.hosted import Hosted
from nano_inference.server.http.metrics import CONTENT_TYPE, leaked_blocks
from nano_inference.server.http.replies import json_reply, reply_in_pieces
from nano_inference.server.server import Server, read_request, reading, served_by
from nano_inference.types import EngineStats

STATS_PATIENCE = 5.0  # seconds; the engine answers even during a step
SCRAPE_PATIENCE = 1.0  # the same for Prometheus, whose own timeout is 10 s


def server_routes(router: APIRouter, server: Server) -> None:
    """Add the routes for health, statistics and the cache."""
    _add_health(router, server)

    @router.get("/version", summary="Version of the server")
    async def version() -> Response:
        return json_reply(200, {"version": nano_inference.__version__})

    @router.get("/stats", summary="Counters of an engine and its queue; ?model= names it")
    async def stats(request: Request) -> Response:
        return json_reply(200, await _stats(server, request.query_params.get("model")))

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        with suppress(NanoInferenceError, ApiError):
            engines = server.engines().values()
            await asyncio.gather(*(_fresh_stats(client, SCRAPE_PATIENCE) for client in engines))
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)

    if server.config.rl:  # the dialects have their own route
        return

    @router.post("/flush_cache", summary="Drop cached prefixes; needs the admin key")
    async def flush_cache() -> Response:
        server.lifecycle.require_open()
        for client in server.engines().values():
            await client.call("flush_cache")
        return json_reply(200, {"flushed": True})


def _add_health(router: APIRouter, server: Server) -> None:
    @router.get("/health", summary="Check that the server is ready; needs no key")
    @router.head("/health", include_in_schema=False)  # used by some load balancers
    @router.get("/ping", name="ping", summary="Same as /health, for gateways")
    @router.post("/ping", name="ping", include_in_schema=False)
    async def health() -> Response:
        status = server.lifecycle.status
        body: dict[str, Any] = {
            "status": status,
            "model_loaded": server.lifecycle.is_ready and status != "dead",
        }
        if status == "dead" and (reason := server.client.public_reason):
            body["reason"] = reason
        if status == "starting" and (loading := server.pool.progress):
            body["loading"] = loading
        return json_reply(200 if status == "ok" else 503, body)

    @router.get("/load", summary="Number of running requests")
    async def load() -> Response:
        return json_reply(200, {"server_load": len(server.exchanges)})


async def _fresh_stats(client: EngineClient, timeout_s: float) -> EngineStats | None:
    """Fetch an engine's statistics and store them in its client. Return the last known ones if the
    engine has died or hangs.
    """
    if client.why_dead is None and not client.is_silent:
        with suppress(TimeoutError):  # it hangs: fall back to the last statistics
            client.stats = await client.call("stats", timeout=timeout_s)
    return client.stats


async def _stats(server: Server, name: str | None) -> dict[str, Any]:
    """Return the counters of the named model's engine: by default, of the one used last."""
    engines = server.engines()
    if name is not None and len(server.pool.models) > 1:
        name = server.pool.named(name).name
    else:
        name = next(iter(engines), server.pool.models[0].name)
    client = engines.get(name)
    latest = None if client is None else await _fresh_stats(client, STATS_PATIENCE)
    queue = {
        "num_samples": 0 if client is None else client.num_samples,
        "num_exchanges": len(server.exchanges),
        "max_batch_size": 0 if client is None else client.info.max_batch_size,
        "max_queued_samples": server.config.max_queued_samples,
    }
    engine = None
    if latest is not None:
        engine = {**asdict(latest), "kv_leaked_blocks": leaked_blocks(latest)}
    models = {model.name: model.status for model in server.pool.models}
    return {
        "status": server.lifecycle.status,
        "restarting": server.lifecycle.status == "dead" and not server.lifecycle.is_lost,
        "model": name,
        "engine": engine,
        "queue": queue,
        **({} if server.pool.stays_loaded else {"models": models}),
    }


class TokenizeRequest(ChatTemplateFields):
    """Body of `POST /tokenize`: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Add special tokens to a text. Default: true."
    )
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


def tokenize(body: bytes, served: Served) -> dict[str, Any]:
    """Return the token ids of a text or a chat. Raises `ApiError` and `InvalidRequest`."""
    request = read_body(body, TokenizeRequest, served.config)
    adapter_of(request.model, served)
    tokenizer = need_tokenizer(served)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("set either prompt or messages, not both.", "prompt")
    if request.messages is not None:
        token_ids = chat_prompt(request, request.messages, served)
    else:
        assert request.prompt is not None
        require_possible_length(request.prompt, served, "prompt")
        token_ids = tokenizer.encode(
            request.prompt, add_special_tokens=request.add_special_tokens is not False
        )
    strings = (
        list(map(served.token_texts.text, token_ids))
        if request.return_token_strs and served.token_texts
        else None
    )
    return {
        "count": len(token_ids),
        "max_model_len": served.engine.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }


def detokenize(body: bytes, served: Served) -> dict[str, Any]:
    """Return the text of token ids, including special tokens. Raises `ApiError`."""
    request = read_body(body, DetokenizeRequest, served.config)
    adapter_of(request.model, served)
    tokenizer = need_tokenizer(served)
    if max(request.tokens, default=0) >= served.engine.vocab_size:
        raise bad_request(
            f"tokens contains {max(request.tokens)}; token ids must be in [0, "
            f"{served.engine.vocab_size}).",
            "tokens",
        )
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}


def token_routes(router: APIRouter, server: Server) -> None:
    """Add the routes that convert between text and tokens."""

    @router.post(
        "/tokenize",
        openapi_extra=operation(TokenizeRequest, TOKENS, summary="Tokenize a text or a chat"),
    )
    async def tokens(request: Request) -> Response:
        return json_reply(200, await read_request(request, server, tokenize))

    @router.post(
        "/detokenize",
        openapi_extra=operation(DetokenizeRequest, TEXT, summary="Convert token ids to text"),
    )
    async def text(request: Request) -> Response:
        return json_reply(200, await read_request(request, server, detokenize))

    @router.post(
        "/v1/messages/count_tokens",
        openapi_extra=operation(
            anthropic_models.CountRequest,
            anthropic_models.COUNT,
            summary="Count the tokens of a prompt",
            error=anthropic_models.ERROR,
        ),
    )
    async def count(request: Request) -> Response:
        return json_reply(200, await read_request(request, server, anthropic.count_tokens))


async def embedded(
    request: Request, server: Server, hosted: Hosted, asked: EmbeddingsAsked
) -> list[bytes]:
    """Return the embeddings of a request's inputs. Raises `ApiError`, and the engine's errors."""
    server.lifecycle.require_open()  # it may have changed while the body arrived
    rows: list[bytes] = []
    seconds = server.config.request_timeout
    with hosted.admission.embedding(len(asked.prompts)):
        async with asyncio.timeout(seconds):  # for all portions, including the wait for a turn
            for prompts in asked.portions():
                async with hosted.embeds:
                    if await request.is_disconnected():
                        raise ClientDisconnect
                    rows += await hosted.client.call(
                        "embed", prompts=prompts, adapter=asked.adapter, timeout=seconds
                    )
    return rows


def embedding_routes(router: APIRouter, server: Server) -> None:
    """Add the route for embeddings."""

    @router.post(
        "/v1/embeddings",
        openapi_extra=operation(EmbeddingsRequest, EMBEDDINGS, summary="Embed a text"),
    )
    async def embeddings(request: Request) -> Response:
        server.lifecycle.require_open()
        if server.pool.stays_loaded:
            server.pool.only.admission.require_room()  # before reading the body
        async with reading(request, server, read_embeddings) as (asked, lease):
            rows = await embedded(request, server, lease.hosted, asked)
            body = asked.answer(rows, served_by(lease.hosted))
            return await reply_in_pieces(body, aside=True)


def fleet_routes(router: APIRouter, server: Server) -> None:
    """Add the routes that manage replicas, if there are several."""
    fleet = server.client.managed if server.pool.stays_loaded else None
    if fleet is None:
        return

    @router.get("/fleet", summary="State of the replicas; needs the admin key")
    async def look() -> Response:
        return json_reply(200, described(fleet.replica_report()))

    @router.post("/fleet/add", summary="Start another replica and wait until it serves")
    async def add() -> Response:
        server.lifecycle.require_open()
        return json_reply(200, {"replica": await fleet.add()})

    @router.post(
        "/fleet/drain",
        summary="Send a replica no new requests; with `move`, also hand over its current ones",
    )
    async def drain(request: Request) -> Response:
        body = await _fleet_body(request, move=False, undo=False)
        left = fleet.drain(_replica_name(body), move=body["move"], draining=not body["undo"])
        return json_reply(200, {"replica": body["replica"], "requests_left": left})

    @router.post("/fleet/remove", summary="Remove a replica; others continue its requests")
    async def remove(request: Request) -> Response:
        body = await _fleet_body(request)
        return json_reply(
            200,
            {
                "replica": _replica_name(body),
                "requests_moved": await fleet.remove(_replica_name(body)),
            },
        )


def described(report: FleetReport) -> dict[str, Any]:
    """Return the reply to `GET /fleet`."""
    moves = report.moves
    buckets = dict(zip((*map(str, BUCKETS), "inf"), moves.counts, strict=True))
    return {
        "weight_version": report.weight_version,
        "paused": report.paused,
        "asleep": list(report.asleep),
        "replicas": [asdict(status) for status in report.replicas],
        "failovers": {
            "deaths": report.deaths,
            "moved": moves.moved,
            "pauses": {each: count for each, count in buckets.items() if count},
            "longest_pause": round(moves.longest, 4),
        },
    }


async def _fleet_body(request: Request, **defaults: bool) -> dict[str, Any]:
    """Read the body of a POST: `replica` and flags. Raises `ApiError`."""
    try:
        body: Any = msgspec.json.decode(await request.body())
    except msgspec.DecodeError:
        raise bad_request('the body must be a JSON object like {"replica": "0"}.') from None
    if not isinstance(body, Mapping):
        raise bad_request('the body must be a JSON object like {"replica": "0"}.')
    fields: dict[str, Any] = dict(body)  # pyright: ignore[reportUnknownArgumentType]
    for name, value in fields.items():
        if name != "replica" and name not in defaults:
            raise bad_request(
                f"unknown field {name!r}; use {', '.join(('replica', *defaults))}.", name
            )
        if name in defaults and not isinstance(value, bool):
            raise bad_request(f"{name} must be true or false.", name)
    return {**defaults, **fields}


def _replica_name(body: Mapping[str, Any]) -> str:
    name = body.get("replica")
    if not isinstance(name, str):
        raise ApiError(400, "replica must be a replica's name from GET /fleet.", "replica")
    return name
