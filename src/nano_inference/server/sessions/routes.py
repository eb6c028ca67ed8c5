"""Routes of sessions (`/sessions`), and of open requests (`/requests`)."""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from nano_inference.errors import NanoInferenceError
from nano_inference.server.api.openai.models import CHAT
from nano_inference.server.api.shared.fields import Strict, read_body
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.api.shared.prompts import (
    adapter_of,
    checked_prompt,
    need_tokenizer,
    require_at_most,
)
from nano_inference.server.api.shared.protocol import ApiProtocol, Served
from nano_inference.server.errors import bad_request
from nano_inference.server.http.replies import (
    EventStream,
    RequestRecord,
    json_reply,
    record_of,
    reply_in_pieces,
)
from nano_inference.server.server import Server, generation_route, read_request
from nano_inference.server.sessions.models import (
    CLOSED,
    PREFETCHED,
    SESSION,
    SESSIONS,
    TOKENS,
    ForkRequest,
    MessagesRequest,
    SessionRequest,
    TurnRequest,
)
from nano_inference.server.sessions.store import Session, SessionOptions
from nano_inference.server.sessions.turn import SessionTurn, extended, plain_messages
from nano_inference.text.conversation import Conversation

Model = TypeVar("Model", bound=Strict)
_PATIENCE = 5.0  # seconds for the engine to answer between two steps
_PATH = "/sessions/{name}"


def session_routes(router: APIRouter, server: Server) -> None:
    """Add the routes of sessions, if the server has one model, whose engine keeps them."""
    if not server.pool.stays_loaded:
        return
    _add_opening(router, server)
    _add_turns(router, server)
    _add_caching(router, server)


def _add_opening(router: APIRouter, server: Server) -> None:
    sessions = server.sessions

    @router.post(
        "/sessions", openapi_extra=operation(SessionRequest, SESSION, summary="Open a session")
    )
    async def begin(request: Request) -> Response:
        server.lifecycle.require_open()
        chat, options = await read_request(request, server, _opened)
        session = sessions.add(record_of(request.scope).owner, options, chat)
        return json_reply(201, _described(session, server))

    @router.get(
        "/sessions", openapi_extra=operation(None, SESSIONS, summary="List your open sessions")
    )
    async def listed(request: Request) -> Response:
        record = record_of(request.scope)
        visible = sessions.of(record.owner, is_admin=record.is_admin)
        rows = [_described(session, server) for session in visible]
        return json_reply(200, {"object": "list", "data": rows})

    @router.get(_PATH, openapi_extra=operation(None, SESSION, summary="Describe a session"))
    async def look(name: str, request: Request) -> Response:
        return json_reply(200, _described(_named(name, request, server), server))

    @router.get(
        f"{_PATH}/tokens",
        openapi_extra=operation(
            None, TOKENS, summary="Get a session's token ids and their authors"
        ),
    )
    async def tokens(name: str, request: Request) -> Response:
        session = _named(name, request, server)
        return await reply_in_pieces(_tokens(session), aside=True)

    @router.post(
        f"{_PATH}/fork",
        openapi_extra=operation(
            ForkRequest, SESSIONS, summary="Open sessions that continue a session", required=False
        ),
    )
    async def fork(name: str, request: Request) -> Response:
        session = _named(name, request, server)
        body = await _read(request, server, ForkRequest)
        count = 1 if body is None else body.n
        require_at_most(count, server.config.max_sessions, "n")
        session.require_idle()
        rows = [_described(each, server) for each in sessions.fork(session, count)]
        return json_reply(201, {"object": "list", "data": rows})

    @router.delete(_PATH, openapi_extra=operation(None, CLOSED, summary="Close a session"))
    async def end(name: str, request: Request) -> Response:
        session = _named(name, request, server)
        session.require_idle()
        sessions.remove(session)
        if session.options.keep_cache_seconds:
            start = _shared_length(session, sessions.relatives(session))
            with suppress(NanoInferenceError, TimeoutError):  # its time or memory ends it anyway
                await _call(server, "release", session, start=start)
        return json_reply(200, {"id": name, "object": "session", "deleted": True})


def _add_turns(router: APIRouter, server: Server) -> None:
    @router.post(
        f"{_PATH}/messages",
        openapi_extra=operation(MessagesRequest, SESSION, summary="Append messages to a session"),
    )
    async def append(name: str, request: Request) -> Response:
        session = _named(name, request, server)
        session.require_idle()
        before = session.chat
        chat = await read_request(request, server, partial(_extended, before))
        server.sessions.extend(session, before, chat)
        if session.options.keep_cache_seconds:
            task = asyncio.create_task(_prefetch_quietly(server, session))
            _background.add(task)
            task.add_done_callback(_background.discard)
        return json_reply(200, _described(session, server))

    @router.post(
        f"{_PATH}/chat/completions",
        openapi_extra=operation(
            TurnRequest, CHAT, summary="Sample the next turn of a session", streams=True
        ),
    )
    async def turn(name: str, request: Request) -> Response:
        session, key = _named(name, request, server), object()
        record_of(request.scope).session = session.root
        session.begin(key)
        make = partial(SessionTurn, session=session, turn=key)
        response: Response | None = None
        try:
            protocol = ApiProtocol(TurnRequest, make, {})
            response = await generation_route(server, protocol)(request)
            return response
        finally:
            if not isinstance(response, EventStream):  # a stream ends the turn itself
                session.end(key)


def _add_caching(router: APIRouter, server: Server) -> None:
    @router.post(
        f"{_PATH}/prefetch",
        openapi_extra=operation(
            None, PREFETCHED, summary="Bring a session's kept blocks back into memory"
        ),
    )
    async def prefetch(name: str, request: Request) -> Response:
        server.lifecycle.require_open()
        session = _named(name, request, server)
        cached = await _call(server, "prefetch", session)
        return json_reply(200, {"id": name, "cached_tokens": cached})

    @router.get("/requests", summary="List open requests and why they wait; no prompts")
    async def requests(request: Request) -> Response:
        statuses = await server.client.call("request_statuses", timeout=_PATIENCE)
        rows = open_requests(server, record_of(request.scope), statuses)
        return json_reply(200, {"object": "list", "data": rows})


_background: set[asyncio.Task[None]] = set()


def open_requests(server: Server, asker: RequestRecord, statuses: Any) -> list[dict[str, Any]]:
    """Return the rows of `GET /requests`: the open requests of the asker's key, or all."""
    records = {name: each.record for each in server.generating for name in each.names}
    rows: list[dict[str, Any]] = []
    for status in statuses:
        record = records.get(status.name)
        if record is None or not (asker.is_admin or record.owner == asker.owner):
            continue
        row = asdict(status)
        row |= {"id": row.pop("name"), "session": record.session, "path": record.path}
        row["age"] = round(time.perf_counter() - record.started, 3)
        row["queued"] = round(row["queued"], 3)
        rows.append(row)
    return rows


def _named(name: str, request: Request, server: Server) -> Session:
    record = record_of(request.scope)
    return server.sessions.get(name, record.owner, is_admin=record.is_admin)


async def _read(request: Request, server: Server, model: type[Model]) -> Model | None:
    """Read an optional body."""

    def make(body: bytes, served: Served) -> Model | None:
        return read_body(body, model, served.config) if body.strip() else None

    return await read_request(request, server, make)


def _opened(body: bytes, served: Served) -> tuple[Conversation, SessionOptions]:
    """Return the conversation and the options of a new session."""
    request = read_body(body, SessionRequest, served.config)
    adapter_of(request.model, served)
    tokenizer = need_tokenizer(served)
    if request.tools is not None:
        most = served.config.max_tools
        require_at_most(len(request.tools), most, "tools", "the number of tools")
    if request.cache_priority and not request.keep_cache_seconds:
        raise bad_request("cache_priority requires keep_cache_seconds.", "cache_priority")
    chat = Conversation(
        tokenizer,
        tuple(plain_messages(request.messages, served)),
        [tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None,
        dict(request.chat_template_kwargs or {}),
        request.on_rewrite or "reject",
    )
    checked_prompt(list(chat), served, "messages")
    options = SessionOptions(
        request.model,
        request.priority,
        request.keep_cache_seconds,
        request.cache_priority,
        request.cache_salt,
    )
    return chat, options


def _extended(before: Conversation, body: bytes, served: Served) -> Conversation:
    request = read_body(body, MessagesRequest, served.config)
    chat = extended(before, request.messages, served)
    checked_prompt(list(chat), served, "messages")
    return chat


async def _call(server: Server, name: str, session: Session, **more: Any) -> int:
    """Run an operation on the session's prompt."""
    model = session.options.model
    adapter = None if model is None else adapter_of(model, server.require_served())
    return await server.client.call(
        name,
        timeout=_PATIENCE,
        prompt=list(session.chat),
        adapter=adapter,
        cache_salt=session.options.cache_salt,
        **more,
    )


async def _prefetch_quietly(server: Server, session: Session) -> None:
    # the request will find the blocks itself
    with suppress(Exception):
        await _call(server, "prefetch", session)


def _shared_length(session: Session, relatives: list[Session]) -> int:
    """Return the number of tokens that must stay kept: those that a relative has too, and the
    opening, with which other sessions may begin.
    """
    ids = session.chat.token_ids
    shared = session.chat.spans[0].end
    for other in relatives:
        theirs = other.chat.token_ids
        low, high = shared, min(len(ids), len(theirs))
        while low < high:  # the lengths of equal beginnings form a range
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ids[:middle] == theirs[:middle] else (low, middle - 1)
        shared = low
    return shared


def _described(session: Session, server: Server) -> dict[str, Any]:
    chat, timeout = session.chat, server.config.session_timeout
    state = "sampling" if session.turn is not None else "open" if chat.is_open else "answered"
    return {
        "id": session.name,
        "object": "session",
        "created_at": int(session.created),
        "parent": session.parent,
        "num_messages": len(chat.messages),
        "num_tokens": len(chat),
        "state": state,
        "model": session.options.model or server.require_served().name,
        "expires_in": round(timeout - (time.monotonic() - session.used), 1),
    }


def _tokens(session: Session) -> dict[str, Any]:
    chat = session.chat
    return {
        "id": session.name,
        "token_ids": chat.token_ids,
        "logprobs": chat.logprobs,
        "loss_mask": chat.loss_mask,
        "spans": [span._asdict() for span in chat.spans],
    }
