"""Control routes: a request is checked by the model of its route, and then answered."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from nano_inference.server.api.shared.json_limits import decode
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.control.requests.fields import Read, Route, read_fields
from nano_inference.server.errors import bad_request
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server, read_request
from nano_inference.server.trainers.base64_bodies import decoded, read_with_file

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
    routes: Iterable[Route],
    answers: Mapping[str, Answer],
    fails: Mapping[str, Fail] | None = None,
) -> None:
    """Serve the calls that `answers` has. `fails` is told of what goes wrong with a request, from
    its first byte on.
    """
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
