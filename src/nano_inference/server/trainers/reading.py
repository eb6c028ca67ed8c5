"""Control routes: the model of a route checks its requests before they are answered.

A body may contain a file of gigabytes as base64. Reading it must not block the event loop, and
neither may a thread that holds the GIL for seconds. So the file's text is cut out before the JSON
is parsed, and decoded in portions.
"""

import binascii
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from nano_inference.server.api.shared.fields import decode
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.requests.field_types import Read, Route, read_fields
from nano_inference.server.errors import ApiError, bad_request
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server, read_request

# function from a request's fields to the JSON of a 200, or to a response
Answer = Callable[[Any], Awaitable[Any]]
Fail = Callable[[BaseException], Awaitable[object]]  # called with the error that ends a request


@dataclass(frozen=True)
class Raw:
    """A request before its fields are checked.

    Attributes:
        body: Object of its JSON body.
        query: All values of each name in its query.
    """

    body: Mapping[str, Any]
    query: Mapping[str, Sequence[str]]

    def read(self, model: type[Read]) -> Read:
        """Return the checked fields. Raises `ApiError` 400."""
        return read_fields(model, self.body, self.query)


def add_routes(
    router: APIRouter,
    server: Server,
    routes: Collection[Route],
    answers: Mapping[str, Answer],
    fails: Mapping[str, Fail] | None = None,
) -> None:
    """Serve the calls in `answers`, each of which needs a row in `routes`. `fails` gets the errors
    of a request, from its first byte on.
    """
    if unknown := answers.keys() - {route.call for route in routes}:
        raise ValueError(f"no row describes {', '.join(map(str, sorted(unknown)))}.")
    for route in routes:
        if route.call in answers:
            fail = (fails or {}).get(route.call)
            add_route(router, route, _endpoint(server, route, answers[route.call], fail))


def _endpoint(
    server: Server, route: Route, answer: Answer, fail: Fail | None
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            fields = (await raw_of(request, server)).read(route.body)
            reply = await answer(fields)
        except BaseException as problem:
            if fail is not None:
                await fail(problem)
            raise
        return reply if isinstance(reply, Response) else json_reply(200, reply)

    return endpoint


def add_route(
    router: APIRouter, route: Route, endpoint: Callable[[Request], Awaitable[Response]]
) -> None:
    """Serve a route with a function of the HTTP request."""
    router.add_api_route(
        route.path,
        endpoint,
        methods=[route.method],
        name=route.path.strip("/"),
        openapi_extra=operation(
            route.body if route.body.model_fields else None,
            {},
            summary=route.about,
            required=any(each.is_required() for each in route.body.model_fields.values()),
        ),
    )


async def raw_of(request: Request, server: Server) -> Raw:
    """Read a control request. A missing or empty body has no fields.

    Raises `ApiError`: 400 if the body is not a JSON object, 503 while the server drains or has no
    engine.
    """
    server.lifecycle.require_open()
    config = server.config
    body = await read_request(
        request, server, lambda data, _: decode(data, config) if data.strip() else {}
    )
    return Raw(body, _query_of(request))


def _query_of(request: Request) -> Mapping[str, Sequence[str]]:
    return {name: request.query_params.getlist(name) for name in request.query_params}


async def read_with_tensors(
    request: Request, server: Server, route: Route, model: type[Read]
) -> tuple[Read, list[bytes | bytearray]]:
    """Read a request's fields and its files. The only file is the body, with fields in the query.
    Otherwise the first of the route's `files` that is set has them in base64.
    """
    server.lifecycle.require_open()
    query = _query_of(request)
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type == "application/octet-stream":
        content = await read_request(request, server, lambda body, _: body)
        return read_fields(model, {}, query), [content]
    body, file = await read_request(
        request, server, lambda body, _: read_with_file(body, server.config, route.files)
    )
    fields = read_fields(model, body, query)
    if file is not None:
        return fields, [file]
    name, texts = next(
        ((name, texts) for name in route.files if (texts := getattr(fields, name)) is not None),
        (route.files[0], ()),
    )
    if not texts:
        raise no_single_file(name)
    return fields, [decoded(text, name) for text in texts]


def only_file(contents: Sequence[bytes | bytearray], name: str) -> bytes | bytearray:
    """Return the only file of a request. Raises `ApiError` 400, which names its field."""
    if len(contents) != 1:
        raise no_single_file(name)
    return contents[0]


def no_single_file(name: str) -> ApiError:
    """Return the error of a request with no file, or with several."""
    return bad_request(
        f"{name} must contain one string, a safetensors file as base64. Or send the file as the "
        "body, as application/octet-stream.",
        name,
    )


LONG = 1 << 16  # minimum bytes of a string that is cut out
MOST_STRINGS = 1000  # maximum strings checked for a long one
WINDOW = 1 << 26  # bytes searched at a time
MOST_PADDING = 2  # maximum padding characters of base64, each of which stands for a byte
PORTION = 1 << 22  # characters of base64 decoded at a time; a multiple of four


def read_with_file(
    body: bytes, config: ServerConfig, names: Sequence[str]
) -> tuple[dict[str, Any], bytearray | None]:
    """Read a body's JSON object, and the file in the first of the fields `names` that is set. The
    file's text is removed from the object. The file is None if that field is not a string or a list
    of one.

    Raises `ApiError` 400.
    """
    if not body or body.isspace():
        return {}, None
    marker = f"file {secrets.token_hex(16)}"
    span = _long_string(body)
    text: memoryview | str | None = None
    if span is not None:
        short = body[: span.start] + marker.encode() + body[span.stop :]
        fields = decode(short, config)
        name, value = _text_of(fields, names)
        if value == marker:
            text = memoryview(body)[span]
        else:
            fields = decode(body, config)  # the long string belongs to another field
    else:
        fields = decode(body, config)
    name, value = _text_of(fields, names)
    if name is None or value is None:
        return fields, None
    content = decoded(value if text is None else text, name)
    return {**fields, name: [""]}, content


def decoded(text: memoryview | str, name: str) -> bytearray:
    """Decode base64 in portions. Raises `ApiError` 400, which names the field."""
    content = bytearray(len(text) // 4 * 3)
    written = 0
    for start in range(0, len(text), PORTION):
        try:
            piece = binascii.a2b_base64(text[start : start + PORTION], strict_mode=True)
        except ValueError:  # also for text that is not ASCII
            raise _no_base64(name) from None
        if start + PORTION < len(text) and len(piece) != PORTION // 4 * 3:
            raise _no_base64(name)  # padding in the middle
        content[written : written + len(piece)] = piece
        written += len(piece)
    if len(text) % 4 or len(content) - written > MOST_PADDING:
        raise _no_base64(name)
    del content[written:]
    return content


def _no_base64(name: str) -> ApiError:
    return bad_request(f"{name} is not valid base64.", name)


def _long_string(body: bytes) -> slice | None:
    """Return the range of the first long string in a JSON text, without its quotes. None: there is
    no such string, or one with escapes comes first.
    """
    end = -1
    for _ in range(MOST_STRINGS):
        start = _find(body, b'"', end + 1, len(body)) + 1
        end = _find(body, b'"', start, len(body)) if start else -1
        if end < 0 or body[end - 1 : end] == b"\\":
            return None
        if end - start >= LONG:
            return None if _find(body, b"\\", start, end) >= 0 else slice(start, end)
    return None


def _find(body: bytes, byte: bytes, start: int, end: int) -> int:
    """Search like `bytes.find`, which holds the GIL, but in windows."""
    for window in range(start, end, WINDOW):
        if (index := body.find(byte, window, min(window + WINDOW, end))) >= 0:
            return index
    return -1


def _text_of(fields: Mapping[str, Any], names: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the first of these fields that is set, and its string."""
    name = next((each for each in names if fields.get(each) is not None), None)
    if name is None:
        return None, None
    value = fields[name]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return name, value if isinstance(value, str) else None
