"""The layers around the routes, as plain ASGI: ids and logs outside, then CORS, then the gate of
keys and limits.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano_inference.serving import paths
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.edge.access import HEALTH, Headers, Keys
from nano_inference.serving.edge.replies import (
    RequestRecord,
    error_reply,
    no_route,
    record_of,
    request_id_of,
    session_of,
)
from nano_inference.serving.errors import ApiError, api_error_of

log = logging.getLogger("nano_inference.serving")

_EXPOSED = ("x-request-id", "request-id", "retry-after", "retry-after-ms")
_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))


class Outermost:
    """Gives every request its id and its record, puts ids on every answer, and answers exceptions
    that no inner layer caught.

    Args:
        app: what is inside.
        done: told of each request after its answer has ended.
        root: what a proxy leaves before the paths.
    """

    def __init__(self, app: ASGIApp, done: Callable[[RequestRecord], None], root: str = "") -> None:
        self._app = app
        self._root = root
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        _strip(scope, self._root)
        headers = dict(reversed(scope["headers"]))  # of several by one name the first counts
        record = RequestRecord(
            request_id_of(headers.get(b"x-request-id")),
            scope["method"],
            scope["path"],
            session_of(headers.get(b"x-session-id")),
            has_version=b"anthropic-version" in headers,
        )
        scope.setdefault("state", {})["record"] = record
        ids = record.request_id.encode("ascii")

        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [
                    *message.get("headers", ()),
                    (b"x-request-id", ids),
                    (b"request-id", ids),
                ]
                if scope["http_version"] == "1.0" and all(
                    name != b"connection" for name, _ in headers
                ):
                    # uvicorn hangs up, but not each of them says so
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, send_with_ids)
        except asyncio.CancelledError:
            record.problem = "cancelled"
            raise
        except Exception as problem:
            log.exception("request %s failed", record.request_id)
            if not record.status:
                await error_reply(api_error_of(problem), record)(scope, receive, send_with_ids)
        finally:
            record.seconds = time.perf_counter() - record.started
            self._done(record)


def _strip(scope: Scope, root: str) -> None:
    """Take a proxy's prefix off the path, before anything goes by it: keys and limits see what the
    router sees.
    """
    path: str = scope["path"]
    if root and (path == root or path.startswith(root + "/")):
        scope["path"] = path[len(root) :] or "/"
        scope["raw_path"] = scope["path"].encode()


class Gate:
    """Lets in what has a key and is within limits.

    Args:
        app: the routes.
        config: the limits.
        ready: raises `ApiError` while the engine is being built.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, ready: Callable[[], None]) -> None:
        self._app = app
        self._config = config
        self._keys = Keys(config)
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as problem:
            refusal = error_reply(problem, record_of(scope))
            if _is_long(scope["headers"]):  # it would be read and thrown away
                refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive, scope["path"]), send)

    def _check(self, scope: Scope) -> None:
        path, headers = scope["path"], scope["headers"]
        if not path.isprintable():  # the router's patterns let a line feed at the end pass
            raise no_route(path)
        self._keys.require(path, headers)
        if path not in HEALTH:
            self._ready()
        if scope["method"] in _WITH_BODY:
            _require_json(headers, or_bytes=self._config.rl and path in paths.WITH_WEIGHTS)
            length = next((value for name, value in headers if name == b"content-length"), b"0")
            if not length.isdigit() or int(length[:20]) > self._limit(path)[0]:
                raise self._too_large(path)

    def _bounded(self, receive: Receive, path: str) -> Receive:
        left, _ = self._limit(path)

        async def receive_bounded() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                if left < 0:
                    raise self._too_large(path)
            return message

        return receive_bounded

    def _limit(self, path: str) -> tuple[int, str]:
        """Bytes that a body may have, and the option that says so."""
        if self._config.rl and path in paths.WITH_WEIGHTS:
            return self._config.rl_max_body_bytes, "rl_max_body_bytes"
        return self._config.max_body_bytes, "max_body_bytes"

    def _too_large(self, path: str) -> ApiError:
        size, option = self._limit(path)
        return ApiError(413, f"the body is larger than {size} bytes ({option}).")


def _is_long(headers: Headers) -> bool:
    """Whether a body follows that is not small, or may be anything."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and len(value) > 5)
        for name, value in headers
    )


def _require_json(headers: Headers, *, or_bytes: bool = False) -> None:
    """JSON says that it is JSON, but `curl -d` says it is a form, and other tools say nothing.

    These are believed, but not in a browser: a page may post forms to any server without asking it
    first (no CORS), so that any page could make a server without keys work for it. Browsers send
    `origin` with such requests.
    """
    found = {name: value for name, value in headers if name in _ABOUT_CONTENT}
    if found.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "compressed bodies are not read; send the JSON as it is.")
    media_type = found.get(b"content-type", b"").split(b";")[0].strip().lower()
    if or_bytes and media_type == b"application/octet-stream":
        return
    if media_type == b"application/json" or (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    ):
        return
    if media_type in (b"", b"application/x-www-form-urlencoded") and b"origin" not in found:
        return
    raise ApiError(415, "the content type must be application/json.")


_ABOUT_CONTENT = frozenset((b"content-type", b"content-encoding", b"origin"))


def in_layers(
    routes: ASGIApp,
    config: ServerConfig,
    ready: Callable[[], None],
    done: Callable[[RequestRecord], None],
) -> ASGIApp:
    """The routes with all that is around them."""
    app: ASGIApp = Gate(routes, config, ready)
    # outside the gate: a preflight carries no key, and pages may read refusals
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
    return Outermost(app, done, config.root_path)
