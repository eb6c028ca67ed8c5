"""JSON answers, and errors in the shape of the protocol that a path speaks."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from nano_inference.serving.edge.record import RequestRecord, record_of
from nano_inference.serving.errors import NO_RETRY, ApiError, error_body
from nano_inference.serving.protocols.reading import shown


def json_reply(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A body of JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_reply(problem: ApiError, record: RequestRecord) -> Response:
    """An error; what it was is kept for the log."""
    record.problem = problem.code or problem.message
    # A client that was refused before its body was read may still be sending it: it is not listened
    # to any more.
    close = (
        {"connection": "close"}
        if problem.status in (408, 413) or problem.code == "draining"
        else {}
    )
    body = error_body(record.path, problem, record.request_id, has_version=record.has_version)
    again = NO_RETRY if problem.status == 500 else {}  # the same bug would be met three times
    return json_reply(problem.status, body, {**again, **problem.headers, **close})


def no_route(path: str) -> ApiError:
    """404."""
    return ApiError(404, f"there is no route {shown(path)}; GET / names those that there are.")


def error_reply_to(request: Request, problem: ApiError) -> Response:
    """The same for a route."""
    return error_reply(problem, record_of(request.scope))
