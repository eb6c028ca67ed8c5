"""Layers around the routes, as plain ASGI: outermost ids and logs, then CORS, then keys and limits.

Most routes need an API key, and those that change the engine need the admin key. Health routes and
the page are open to all.
"""

import asyncio
import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable
from enum import Enum
from hashlib import sha256
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano_inference.server import paths
from nano_inference.server.config import ServerConfig
from nano_inference.server.door import HEALTH
from nano_inference.server.errors import NO_RETRY, ApiError, api_error_of
from nano_inference.server.http.replies import (
    RequestRecord,
    error_reply,
    no_route,
    record_of,
    request_id_of,
    session_of,
)

Headers = Iterable[tuple[bytes, bytes]]


class Level(Enum):
    """Access level that a route requires."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


# All other paths, even unknown ones, are `KEY`.
LEVELS: dict[str, Level] = dict.fromkeys(HEALTH | paths.PAGE, Level.OPEN)
LEVELS |= dict.fromkeys(("/flush_cache", "/models/load", "/models/unload"), Level.ADMIN)
LEVELS |= dict.fromkeys(("/fleet", "/fleet/add", "/fleet/drain", "/fleet/remove"), Level.ADMIN)
# Additional levels with `ServerConfig.rl`.
RL_LEVELS: dict[str, Level] = dict.fromkeys(paths.CHANGING, Level.ADMIN) | dict.fromkeys(
    paths.OPEN, Level.OPEN
)


class Keys:
    """Keys of a server. A comparison takes the same time for every wrong key.

    Trainers send no key. So with `rl` and without an admin key, routes that change the engine
    require no more than other routes. `ServerConfig` allows that only on a loopback address, or
    with `rl_open`. These routes reject requests of web pages, since any page opened on this machine
    could reach them. Without `rl_open` they also reject requests forwarded by a proxy.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._admin = None if config.admin_key is None else _digest(config.admin_key.encode())
        self._levels = LEVELS | RL_LEVELS if config.rl else LEVELS
        self._is_trusting = config.rl and config.admin_key is None
        # allowed `Host` in addition to addresses; None: any
        self._name = None if config.rl_open else config.host.lower()

    def require(self, path: str, headers: Headers) -> tuple[str, bool]:
        """Check a request's access. Return the digest of its key, or "" if none is needed, and True
        if it opens what belongs to other keys. Without keys, all clients are one.

        Raises:
            ApiError: 401 for a missing or wrong key. 403 for a key that does not open this route,
            or for a web page on a route that changes the engine.
        """
        level = self._levels.get(path, Level.KEY)
        if level is Level.ADMIN and self._is_trusting:
            self._refuse_strangers(headers)
            level = Level.KEY
        if level is Level.OPEN or (level is Level.KEY and not self._keys):
            return "", not self._keys
        digests = [_digest(key) for key in _keys_in(headers)]
        if self._admin is not None and _among(digests, [self._admin]):
            return self._admin.hex(), True  # the admin key opens every route
        users = [digest for digest in digests if _among([digest], self._keys)]
        is_user = bool(users)
        if level is Level.KEY and not is_user:
            raise ApiError(401, _WRONG if digests else _MISSING, headers=_ASK)
        if level is Level.ADMIN:
            if self._admin is None:
                raise ApiError(
                    403,
                    "this route is off: start the server with an admin key to enable it.",
                    headers=NO_RETRY,
                )
            if not is_user:
                raise ApiError(401, _WRONG if digests else _MISSING, headers=_ASK)
            raise ApiError(403, "this route needs the admin key.", headers=NO_RETRY)
        return users[0].hex(), False

    def _refuse_strangers(self, headers: Headers) -> None:
        """Reject web pages and requests that a proxy forwards. A proxy's requests come from this
        machine, but may be anyone's.

        Browsers mark a page's requests with `Origin` or `Sec-Fetch-Site`. With DNS rebinding they
        do not, but `Host` is then the page's domain. Raises `ApiError` 403.
        """
        for name, value in headers:
            if name in _PROXIED and self._name is not None:
                raise ApiError(403, _NO_PROXIES, headers=NO_RETRY)
            is_page = name == b"origin" or (
                name == b"sec-fetch-site" and value.strip().lower() != b"none"
            )
            if is_page or (name == b"host" and not self._is_called(value.decode("latin-1"))):
                raise ApiError(403, _NO_PAGES, headers=NO_RETRY)

    def _is_called(self, host: str) -> bool:
        """Return True if `Host` is an address, or the configured host."""
        name = host_name(host)
        return self._name is None or name == self._name or is_address(name)


def host_name(header: str) -> str:
    """Return the name in a `Host` header in lower case, without port and brackets."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def is_address(name: str) -> bool:
    """Return True for an IP address or `localhost`: names that no website owner can point to this
    machine.
    """
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_PROXIED = frozenset((b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"))
_NO_PROXIES = (
    "this route does not accept requests forwarded by a proxy, which may be anyone's; "
    "start the server with --admin-key or --rl-open."
)
_MISSING = "an API key is required: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
_NO_PAGES = (
    "web pages cannot use this route: do not send Origin or Sec-Fetch-Site, and use an IP "
    "address or localhost as Host. Or start the server with --admin-key and send that key."
)
_WRONG = "the API key is invalid."
_ASK = {"www-authenticate": "Bearer"}


def _keys_in(headers: Headers) -> list[bytes]:
    keys: list[bytes] = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            keys.append(value[7:].strip())
    return keys[:2]


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()  # equal lengths, so that timing does not reveal a key's length


def _among(digests: list[bytes], keys: list[bytes]) -> bool:
    matches = False
    for digest in digests:
        for key in keys:  # continue after a match, so that timing reveals nothing
            matches |= hmac.compare_digest(digest, key)
    return matches


log = logging.getLogger("nano_inference.server")

_EXPOSED = ("x-request-id", "request-id", "retry-after", "retry-after-ms")
_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))


class Outermost:
    """Layer that gives every request an id and a record, adds the id to every reply, and answers
    exceptions that no inner layer caught.

    Args:
        app: Inner application.
        done: Called with each request's record after its reply has ended.
        root: Path prefix that a proxy adds.
    """

    def __init__(self, app: ASGIApp, done: Callable[[RequestRecord], None], root: str = "") -> None:
        self._app = app
        self._root = root
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        _strip(scope, self._root)
        headers = dict(reversed(scope["headers"]))  # the first of several equal names counts
        record = RequestRecord(
            request_id_of(headers.get(b"x-request-id")),
            scope["method"],
            scope["path"],
            session_of(headers.get(b"x-session-id")),
            has_version=b"anthropic-version" in headers,
            traceparent=headers.get(b"traceparent", b"").decode("latin-1") or None,
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
                message["headers"] = headers
            await send(message)

        if scope["http_version"] == "1.0":
            send = _without_chunks(send, scope["state"].get("connection"))

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


def _without_chunks(send: Send, connection: Any) -> Send:
    """Support HTTP/1.0, which has no chunks and is used by some proxies: a reply without a length
    ends with its connection.
    """
    unsized: Any = None

    async def send_unsized(message: Message) -> None:
        nonlocal unsized
        if message["type"] == "http.response.start":
            names = [name for name, _ in message["headers"]]
            if b"connection" not in names:  # uvicorn closes it, but does not always announce that
                message["headers"].append((b"connection", b"close"))
            unsized = None if b"content-length" in names else connection
            if unsized is not None:
                unsized.begin_without_length()
        elif unsized is not None and not message.get("more_body", False):
            unsized.end_without_length(message.get("body", b""))
        await send(message)

    return send_unsized


def _strip(scope: Scope, root: str) -> None:
    """Remove a proxy's prefix from the path, so that keys and limits apply to the path that the
    router sees.
    """
    path: str = scope["path"]
    if root and (path == root or path.startswith(root + "/")):
        scope["path"] = path[len(root) :] or "/"
        scope["raw_path"] = scope["path"].encode()


class Gate:
    """Layer that admits requests that have a key and are within the limits.

    Args:
        app: Routes.
        config: Limits and keys.
        ready: Raises `ApiError` while the engine is being built.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, ready: Callable[[], None]) -> None:
        self._app = app
        self._config = config
        self._keys = Keys(config)
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as problem:
            refusal = error_reply(problem, record_of(scope))
            if _is_long(scope["headers"]):  # otherwise the body would be read and discarded
                refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive, scope["path"]), send)

    def _check(self, scope: Scope) -> None:
        path, headers = scope["path"], scope["headers"]
        if not path.isprintable():  # the router's patterns accept a trailing line feed
            raise no_route(path)
        record = record_of(scope)
        record.owner, record.is_admin = self._keys.require(path, headers)
        if path not in HEALTH | paths.PAGE:
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
        """Return the maximum bytes of a body, and the option that sets it."""
        if self._config.rl and path in paths.WITH_WEIGHTS:
            return self._config.rl_max_body_bytes, "rl_max_body_bytes"
        return self._config.max_body_bytes, "max_body_bytes"

    def _too_large(self, path: str) -> ApiError:
        size, option = self._limit(path)
        return ApiError(413, f"the body exceeds {size} bytes ({option}).")


def _is_long(headers: Headers) -> bool:
    """Return True if a large body, or one of unknown size, follows."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and len(value) > 5)
        for name, value in headers
    )


def _require_json(headers: Headers, *, or_bytes: bool = False) -> None:
    """Check that a body is JSON.

    Bodies without a content type, or declared as a form as `curl -d` does, are accepted too, but
    not from browsers, which send `origin` with them. A page may post forms to any server without a
    CORS preflight, so that any page could use a server without keys.
    """
    values = {name: value for name, value in headers if name in _ABOUT_CONTENT}
    if values.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "compressed bodies are not supported; send plain JSON.")
    media_type = values.get(b"content-type", b"").split(b";")[0].strip().lower()
    if or_bytes and media_type == b"application/octet-stream":
        return
    if media_type == b"application/json" or (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    ):
        return
    if media_type in (b"", b"application/x-www-form-urlencoded") and b"origin" not in values:
        return
    raise ApiError(415, "the content type must be application/json.")


_ABOUT_CONTENT = frozenset((b"content-type", b"content-encoding", b"origin"))


def in_layers(
    routes: ASGIApp,
    config: ServerConfig,
    ready: Callable[[], None],
    done: Callable[[RequestRecord], None],
) -> ASGIApp:
    """Wrap the routes in their layers."""
    app: ASGIApp = Gate(routes, config, ready)
    # outside the gate: a preflight carries no key, and pages may read error replies
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
    return Outermost(app, done, config.root_path)
