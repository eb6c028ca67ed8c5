"""Routes of stored responses: read, replay, cancel, delete."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from nano_inference.server.api.openai.kept_responses import KeptResponse, page_of
from nano_inference.server.api.openai.responses_answer import CANCELLED
from nano_inference.server.api.openai.responses_models import DELETED, ITEMS, RESPONSE
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.server.http.replies import json_reply, record_of
from nano_inference.server.server import Server, replayed

_CANCELED = ApiError(499, "the response was canceled.", code=CANCELLED)
PATH = "/v1/responses/{name}"


def response_routes(router: APIRouter, server: Server) -> None:
    """Add the routes for stored responses."""
    _reading_routes(router, server)
    _ending_routes(router, server)


def _kept_for(name: str, request: Request, server: Server) -> KeptResponse:
    return server.pool.responses.get(name, owner=record_of(request.scope).owner)


def _reading_routes(router: APIRouter, server: Server) -> None:
    @router.get(PATH, openapi_extra=operation(None, RESPONSE, summary="Get a stored response"))
    async def look(
        name: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=0)] | None = None,
    ) -> Response:
        kept = _kept_for(name, request, server)
        if not stream:
            if starting_after is not None:
                raise bad_request("starting_after requires stream=true.", "starting_after")
            return json_reply(200, kept.current)
        if kept.detached is None or not kept.detached.keeps_events:
            raise bad_request(
                "the events of this response were not stored; create it with background: true and "
                "stream: true.",
                "stream",
            )
        number = 0 if starting_after is None else starting_after + 1
        return replayed(kept.detached, number, request.receive, record_of(request.scope))

    @router.get(
        f"{PATH}/input_items",
        openapi_extra=operation(None, ITEMS, summary="List the input of a stored response"),
    )
    async def items(
        name: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        return json_reply(200, page_of(_kept_for(name, request, server).items, limit, order, after))


def _ending_routes(router: APIRouter, server: Server) -> None:
    @router.post(
        f"{PATH}/cancel",
        openapi_extra=operation(None, RESPONSE, summary="Cancel a response in the background"),
    )
    async def cancel(name: str, request: Request) -> Response:
        kept = _kept_for(name, request, server)
        if kept.detached is None:
            raise bad_request(
                f"response {shown(name)} was not created with background: true; close its "
                "connection instead."
            )
        await kept.detached.stop(_CANCELED)
        return json_reply(200, _kept_for(name, request, server).response)

    @router.delete(PATH, openapi_extra=operation(None, DELETED, summary="Delete a stored response"))
    async def remove(name: str, request: Request) -> Response:
        kept = _kept_for(name, request, server)
        if kept.detached is not None:
            await kept.detached.stop(_CANCELED)
        server.pool.responses.remove(name, record_of(request.scope).owner)
        return json_reply(200, {"id": name, "object": "response", "deleted": True})
