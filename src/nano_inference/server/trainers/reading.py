"""Control routes: a request is checked by the model of its route, and then answered.

A body may bring a file of up to gigabytes as base64. Reading one must not stop the event loop, and
a thread that holds the interpreter's lock for seconds would. So the text of the file is taken out
before the JSON is parsed, and decoded in portions.
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

Answer = Callable[
    [Any], Awaitable[Any]
]  # the JSON of a 200, or the response, to a request's fields
Fail = Callable[[BaseException], Awaitable[object]]  # told of what ends a request


@dataclass(frozen=True)
class Raw:
    """A request as it came.

    Attributes:
        body: of its JSON.
        query: all that its query says of each name.
    """

    body: Mapping[str, Any]
    query: Mapping[str, Sequence[str]]

    def read(self, model: type[Read]) -> Read:
        """Its fields. Raises `ApiError`, 400."""
        return read_fields(model, self.body, self.query)


def add_routes(
    router: APIRouter,
    server: Server,
    routes: Collection[Route],
    answers: Mapping[str, Answer],
    fails: Mapping[str, Fail] | None = None,
) -> None:
    """Serve the calls that `answers` has, each of which has a row. `fails` gets what goes wrong
    with a request, from its first byte on.
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
            given = (await raw_of(request, server)).read(route.body)
            told = await answer(given)
        except BaseException as problem:
            if fail is not None:
                await fail(problem)
            raise
        return told if isinstance(told, Response) else json_reply(200, told)

    return endpoint


def add_route(
    router: APIRouter, route: Route, endpoint: Callable[[Request], Awaitable[Response]]
) -> None:
    """Serve a route by a function of the HTTP request."""
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
    """Read a control request. A body that is missing or empty says nothing.

    Raises `ApiError`: 400 where the body is no JSON object, 503 while the server drains or has no
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
) -> tuple[Read, bytes | bytearray]:
    """The fields of a request, and the safetensors file that it brings: as the body, next to what
    the query says, or as base64 in the first of the route's `files` that is there.
    """
    server.lifecycle.require_open()
    query = _query_of(request)
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type == "application/octet-stream":
        content = await read_request(request, server, lambda body, _: body)
        return read_fields(model, {}, query), content
    body, file = await read_request(
        request, server, lambda body, _: read_with_file(body, server.config, route.files)
    )
    given = read_fields(model, body, query)
    if file is not None:
        return given, file
    name, texts = next(
        ((name, texts) for name in route.files if (texts := getattr(given, name)) is not None),
        (route.files[0], ()),
    )
    if len(texts) != 1:
        raise bad_request(
            f"{name} must hold one string, a safetensors file as base64; or send the file itself "
            "as the body, as application/octet-stream.",
            name,
        )
    return given, decoded(texts[0], name)  # of the query, which is short


LONG = 1 << 16  # bytes of a string that is taken out
MOST_STRINGS = 1000  # that are looked at for a long one
WINDOW = 1 << 26  # bytes that are searched at a time
MOST_PADDING = 2  # characters at the end of base64, for a byte each
PORTION = 1 << 22  # characters of base64 that are decoded at a time; a multiple of four


def read_with_file(
    body: bytes, config: ServerConfig, names: Sequence[str]
) -> tuple[dict[str, Any], bytearray | None]:
    """The JSON object that a body holds, and the file that the first of the fields `names` that is
    there brings, whose text the object no longer has; None: that field holds no string, nor a list
    of one.

    Raises `ApiError`, 400.
    """
    if not body or body.isspace():
        return {}, None
    marker = f"file {secrets.token_hex(16)}"
    place = _long_string(body)
    text: memoryview | str | None = None
    if place is not None:
        short = body[: place.start] + marker.encode() + body[place.stop :]
        given = decode(short, config)
        name, found = _text_of(given, names)
        if found == marker:
            text = memoryview(body)[place]
        else:
            given = decode(body, config)  # the long string is another field's
    else:
        given = decode(body, config)
    name, found = _text_of(given, names)
    if name is None or found is None:
        return given, None
    content = decoded(found if text is None else text, name)
    return {**given, name: [""]}, content


def decoded(text: memoryview | str, name: str) -> bytearray:
    """What base64 says, decoded in portions. Raises `ApiError`, 400, which names the field."""
    content = bytearray(len(text) // 4 * 3)
    written = 0
    for start in range(0, len(text), PORTION):
        try:
            piece = binascii.a2b_base64(text[start : start + PORTION], strict_mode=True)
        except ValueError:  # what is not ASCII, too
            raise _no_base64(name) from None
        if start + PORTION < len(text) and len(piece) != PORTION // 4 * 3:
            raise _no_base64(name)  # it ends in the middle
        content[written : written + len(piece)] = piece
        written += len(piece)
    if len(text) % 4 or len(content) - written > MOST_PADDING:
        raise _no_base64(name)
    del content[written:]
    return content


def _no_base64(name: str) -> ApiError:
    return bad_request(f"{name} is not base64.", name)


def _long_string(body: bytes) -> slice | None:
    """Where the first long string of a JSON text lies, without its quotes; None: there is none, or
    strings with escapes come first.
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
    """As `bytes.find`, which lets no other thread run: in windows."""
    for place in range(start, end, WINDOW):
        if (found := body.find(byte, place, min(place + WINDOW, end))) >= 0:
            return found
    return -1


def _text_of(given: Mapping[str, Any], names: Sequence[str]) -> tuple[str | None, str | None]:
    """The first of these fields that is there, and its string."""
    name = next((each for each in names if given.get(each) is not None), None)
    if name is None:
        return None, None
    value = given[name]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return name, value if isinstance(value, str) else None
