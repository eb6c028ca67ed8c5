"""The client's routes as a FastAPI application, wrapped in a gate that checks keys and sizes."""

import asyncio
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano_inference.errors import NanoInferenceError
from nano_inference.server import is_loopback
from nano_inference.server.http import host_name, is_address
from nano_training_service.checkpoints import TYPES, Checkpoint, Run, moment
from nano_training_service.errors import Refused, refusal_of
from nano_training_service.futures import Future, Result
from nano_training_service.links import Links
from nano_training_service.messages import (
    CancelFuture,
    ClientConfig,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    FinishSession,
    Heartbeat,
    JoinSamplingSession,
    LoadWeights,
    ModelRequest,
    OptimStep,
    RetrieveFuture,
    Sample,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    SetLifetime,
    WeightsInfo,
)
from nano_training_service.protobuf import forward_backward_request
from nano_training_service.service import Service

ROOT = "/api/v1"
FILES = f"{ROOT}/files"  # signed links instead of API keys
PROTOBUF = "application/x-protobuf"
POLL = 20.0  # seconds that a request for a result waits; the client's timeout is 45
_MOST_LISTED = 1000
# maximum bytes of a JSON body (prompts of a million tokens), and of one parsed on the event loop
_MOST_JSON, _AT_ONCE = 8 << 20, 64 << 10
_BODIES = 4  # limit of all bodies being received together, in multiples of the largest body

# possibly a lone surrogate, which a UTF-8 reply cannot contain
_HALF = re.compile(r"\\u[dD][89a-fA-F]")

Asked = TypeVar("Asked", bound=BaseModel)
Listed = TypeVar("Listed", Run, Checkpoint)
Answer = dict[str, Any] | Response


def build_app(service: Service, *, poll: float = POLL) -> ASGIApp:
    """Build the application, which runs `service.watch` until its shutdown and then closes
    `service`.

    Args:
        poll: Seconds that a request for a result waits before the reply is "try again".
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.watch())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await service.close()

    app = FastAPI(
        title="nano-inference training service",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    _add_sessions(app, service)
    _add_training(app, service)
    _add_results(app, service, poll)
    _add_sampling(app, service)
    _add_records(app, service)
    _add_downloads(app, service)
    for kind in (NanoInferenceError, HTTPException, TimeoutError, Exception):
        app.add_exception_handler(kind, _answer_to)
    return Gate(app, service.config.api_keys, service.config.max_body_bytes, service.config.host)


async def _answer_to(_: Request, problem: Exception) -> Response:
    if isinstance(problem, HTTPException):
        return _error(problem.status_code, f"this service has no such route: {problem.detail}.")
    refusal = refusal_of(problem, "a request")
    return _error(refusal.status, str(refusal))


def _error(status: int, message: str) -> Response:
    return JSONResponse({"detail": message}, status)


def _route(
    app: FastAPI,
    path: str,
    answer: Callable[..., Any],
    method: Literal["GET", "POST", "PUT", "DELETE"] = "GET",
) -> None:
    app.add_api_route(ROOT + path, answer, methods=[method], response_model=None)


def _post(
    app: FastAPI,
    path: str,
    kind: type[Asked],
    answer: Callable[[Asked], Answer | Awaitable[Answer]],
) -> None:
    """Add a JSON route. `answer` gets the parsed body of the request."""

    async def route(request: Request) -> Response:
        asked = await _read(request, kind)
        reply = answer(asked)
        reply = await reply if isinstance(reply, Awaitable) else reply
        return reply if isinstance(reply, Response) else JSONResponse(reply)

    _route(app, path, route, "POST")


async def _read(request: Request, kind: type[Asked]) -> Asked:
    body = await request.body()
    if len(body) > _MOST_JSON:
        raise Refused(f"the JSON body exceeds the limit of {_MOST_JSON} bytes.", 413)
    if len(body) <= _AT_ONCE:
        return _parsed(body, kind)
    return await asyncio.to_thread(_parsed, body, kind)


def _parsed(body: bytes, kind: type[Asked]) -> Asked:
    try:
        text = (body or b"{}").decode()
        content = json.loads(text)
        if _HALF.search(text):
            json.dumps(content, ensure_ascii=False).encode()  # raises for a lone surrogate
        return kind.model_validate(content)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise Refused(f"{where}: {first['msg']}.") from None
    except (ValueError, RecursionError):
        raise Refused("the body is not JSON.") from None


def _ticket(future: Future) -> dict[str, Any]:
    ticket: dict[str, Any] = {"request_id": future.request_id}
    return ticket if future.model_id is None else {**ticket, "model_id": future.model_id}


# -- sessions --------------------------------------------------------------------------------------


def _add_sessions(app: FastAPI, service: Service) -> None:
    def create(about: CreateSession) -> Answer:
        made = service.create_session(about)
        return {"type": "create_session", "session_id": made.session_id}

    def beat(asked: Heartbeat) -> Answer:
        service.session(asked.session_id)
        return {"type": "session_heartbeat"}

    async def health() -> Answer:
        return {"status": "ok"}

    async def capabilities() -> Answer:
        model = {
            "model_name": service.name,
            "max_context_length": service.base.max_model_len,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    async def telemetry(request: Request) -> Answer:
        await request.body()  # read and discarded
        return {"status": "accepted"}

    async def finish(session_id: str, request: Request) -> Response:
        await _read(request, FinishSession)
        service.end_session(service.session(session_id), "its client finished it.")
        return Response(status_code=204)

    async def sessions(limit: int = 20, offset: int = 0) -> Answer:
        return {"sessions": list(service.sessions)[offset : offset + limit]}

    async def session(session_id: str) -> Answer:
        record = service.session(session_id)
        return {
            "training_run_ids": list(record.models),
            "sampler_ids": list(record.samplers),
            "display_name": record.about.display_name,
        }

    _post(app, "/client/config", ClientConfig, lambda _: {"sample_join_sampling_session": True})
    _post(app, "/client/dynamic_config", ClientConfig, lambda _: {"sample_cancel_enabled": True})
    _post(app, "/create_session", CreateSession, create)
    _post(app, "/session_heartbeat", Heartbeat, beat)
    _route(app, "/sessions/{session_id}/finish", finish, "POST")
    _route(app, "/sessions", sessions)
    _route(app, "/sessions/{session_id}", session)
    _route(app, "/healthz", health)
    _route(app, "/get_server_capabilities", capabilities)
    _route(app, "/telemetry", telemetry, "POST")


# -- training --------------------------------------------------------------------------------------


def _add_training(app: FastAPI, service: Service) -> None:
    # parsing a body of 64 MiB is slow, so it runs on a thread, one body at a time
    parsing = asyncio.Semaphore(1)

    async def forward_backward(request: Request) -> Answer:
        body = await request.body()
        async with parsing:
            asked = await asyncio.to_thread(forward_backward_request, body)
        return _ticket(service.run_batch(asked))

    _route(app, "/forward_backward", forward_backward, "POST")
    _post(app, "/create_model", CreateModel, lambda asked: _ticket(service.create_model(asked)))
    _post(app, "/get_info", ModelRequest, lambda asked: service.info(service.model(asked.model_id)))
    _post(app, "/optim_step", OptimStep, lambda asked: _ticket(service.optim_step(asked)))
    _post(app, "/save_weights", SaveWeights, lambda asked: _ticket(service.save_weights(asked)))
    _post(
        app,
        "/save_weights_external",
        SaveExternal,
        lambda asked: _ticket(service.save_external(asked)),
    )
    _post(app, "/load_weights", LoadWeights, lambda asked: _ticket(service.load_weights(asked)))
    _post(
        app,
        "/save_weights_for_sampler",
        SaveForSampler,
        lambda asked: _ticket(service.save_for_sampler(asked)),
    )


def _add_results(app: FastAPI, service: Service, poll: float) -> None:
    async def retrieve(asked: RetrieveFuture) -> Answer:
        return _result(asked.request_id, await service.futures.fetch(asked.request_id, poll))

    def cancel(asked: CancelFuture) -> Answer:
        service.cancel(asked.request_id)
        return Response(status_code=204)

    _post(app, "/retrieve_future", RetrieveFuture, retrieve)
    _post(app, "/cancel_future", CancelFuture, cancel)


def _result(request_id: str, result: Result | None) -> Answer:
    match result:
        case None:
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        case bytes():
            return Response(result, media_type=PROTOBUF)
        case Refused():
            return {"error": str(result), "category": result.category}
        case _:
            return result


# -- sampling --------------------------------------------------------------------------------------


def _add_sampling(app: FastAPI, service: Service) -> None:
    def create(asked: CreateSamplingSession) -> Answer:
        made = service.create_sampling_session(asked)
        return {"type": "create_sampling_session", "sampling_session_id": made}

    def sample(asked: Sample) -> Answer:
        future, ids = service.sample(asked)
        return {**_ticket(future), "sample_sequence_ids": ids}

    async def sampler(sampler_id: str) -> Answer:
        _, weights = service.sampler(sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": service.name,
            "model_path": weights.path,
        }

    def join(asked: JoinSamplingSession) -> Answer:
        number = service.join(asked.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": number}

    _post(app, "/create_sampling_session", CreateSamplingSession, create)
    _post(app, "/join_sampling_session", JoinSamplingSession, join)
    _post(app, "/asample", Sample, sample)
    _route(app, "/samplers/{sampler_id}", sampler)


# -- records ---------------------------------------------------------------------------------------


def _add_records(app: FastAPI, service: Service) -> None:
    kept = service.checkpoints

    def weights_info(asked: WeightsInfo) -> Answer:
        run = kept.run(kept.find(asked.tinker_path).run_id)
        return {
            "base_model": run.base_model,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": run.rank,
            "train_unembed": run.train_unembed,
            "train_mlp": run.train_mlp,
            "train_attn": run.train_attn,
        }

    def record_of(run: Run) -> dict[str, Any]:
        return _run_record(run, kept.of(run.run_id))

    def runs(limit: int = 20, offset: int = 0) -> Answer:
        return _page("training_runs", kept.runs(), record_of, limit, offset)

    def run(run_id: str) -> Answer:
        return record_of(kept.run(run_id))

    def of_run(run_id: str) -> Answer:
        kept.run(run_id)
        return {"checkpoints": [_record(each) for each in kept.of(run_id)]}

    def of_all(limit: int = 100, offset: int = 0) -> Answer:
        return _page("checkpoints", kept.of(), _record, limit, offset)

    def remove(run_id: str, kind: str, name: str) -> Response:
        kept.remove(f"tinker://{run_id}/{kind}/{name}")
        return Response(status_code=204)

    async def set_ttl(run_id: str, kind: str, name: str, request: Request) -> Response:
        asked = await _read(request, SetLifetime)
        path = f"tinker://{run_id}/{kind}/{name}"
        await asyncio.to_thread(kept.set_ttl, path, asked.ttl_seconds)
        return Response(status_code=204)

    _post(app, "/weights_info", WeightsInfo, weights_info)
    # two parts, so that `.../weights/a/publish` does not match as a checkpoint
    one = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
    _route(app, "/training_runs", runs)
    _route(app, "/training_runs/{run_id}", run)
    _route(app, "/training_runs/{run_id}/checkpoints", of_run)
    _route(app, f"{one}/ttl", set_ttl, "PUT")
    _route(app, one, remove, "DELETE")
    _route(app, "/checkpoints", of_all)


def _add_downloads(app: FastAPI, service: Service) -> None:
    links = Links()

    def urls(run_id: str, name: str, request: Request) -> Answer:
        checkpoint = service.checkpoints.find(f"tinker://{run_id}/external_weights/{name}")
        made, expires = {}, 0
        for file in checkpoint.files:
            path = f"{FILES}/{run_id}/{name}/{file}"
            query, expires = links.sign(path)
            made[file] = f"{str(request.base_url).rstrip('/')}{path}?{query}"
        return {"urls": made, "expires": moment(expires)}

    def file(run_id: str, name: str, file: str, expires: int, signature: str) -> Answer:
        links.require(f"{FILES}/{run_id}/{name}/{file}", expires, signature)
        checkpoint = service.checkpoints.find(f"tinker://{run_id}/external_weights/{name}")
        return FileResponse(checkpoint.files[file])

    one = "/training_runs/{run_id}/checkpoints/external_weights/{name}"
    _route(app, f"{one}/external_weights_urls", urls)
    _route(app, "/files/{run_id}/{name}/{file}", file)


def _record(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": TYPES[checkpoint.kind],
        "time": moment(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires is None else moment(checkpoint.expires),
    }


def _run_record(run: Run, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    newest = {kind: [each for each in checkpoints if each.kind == kind][:1] for kind in TYPES}
    texts = {key: str(value) for key, value in (run.user_metadata or {}).items()}
    return {
        "training_run_id": run.run_id,
        "base_model": run.base_model,
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": run.rank,
        "last_request_time": moment(run.last_request),
        "last_checkpoint": next(map(_record, newest["weights"]), None),
        "last_sampler_checkpoint": next(map(_record, newest["sampler_weights"]), None),
        "user_metadata": texts or None,
    }


def _page(
    name: str, records: list[Listed], record: Callable[[Listed], Any], limit: int, offset: int
) -> Answer:
    part = records[offset : offset + min(limit, _MOST_LISTED)]
    cursor = {"offset": offset, "limit": limit, "total_count": len(records)}
    return {name: [record(each) for each in part], "cursor": cursor}


# -- the gate --------------------------------------------------------------------------------------


class Gate:
    """Check of API keys and body sizes. Requests of web pages are rejected: their browser sends
    `Origin` or, after DNS rebinding, the page's name as `Host`.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], most: int, host: str) -> None:
        self._app, self._most, self._host = app, most, host.lower()
        self._held = 0  # bytes of bodies being received
        self._keys = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except Refused as problem:
            await _error(problem.status, str(problem))(scope, receive, send)
            return
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            size = len(message.get("body", b""))
            taken, self._held = taken + size, self._held + size
            if taken > self._most:
                raise self._too_large()
            if self._held > _BODIES * self._most:
                raise Refused(
                    f"the bodies being received exceed {_BODIES} times "
                    f"max_body_bytes={self._most}; try again.",
                    429,
                    "server",
                )
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._held -= taken

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if b"origin" in headers:
            raise Refused("web pages may not use this service.", 403)
        host = host_name(headers.get(b"host", b"").decode("latin-1"))
        if is_loopback(self._host) and not (is_address(host) or host == self._host):
            raise Refused("Host must be an IP address or localhost.", 403)
        path = scope["path"]
        if self._keys and path != f"{ROOT}/healthz" and not path.startswith(f"{FILES}/"):
            digest = sha256(headers.get(b"x-api-key", b"").strip()).digest()
            if not sum(hmac.compare_digest(digest, key) for key in self._keys):
                raise Refused("send one of the API keys of this service as X-API-Key.", 401)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise Refused("compressed bodies are not supported; send the body uncompressed.", 415)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._most:
            raise self._too_large()

    def _too_large(self) -> Refused:
        return Refused(f"the body exceeds the limit of {self._most} bytes (max_body_bytes).", 413)
