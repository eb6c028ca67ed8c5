"""The ASGI application: routes, and the layers around them."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from nano_inference.errors import NanoInferenceError
from nano_inference.server import paths
from nano_inference.server.api.shared.protocol import ApiProtocol
from nano_inference.server.errors import NO_RETRY, ApiError, api_error_of, shown
from nano_inference.server.http.layers import in_layers
from nano_inference.server.http.replies import error_reply_to, no_route
from nano_inference.server.server import Server, generation_route

TRAINERS = paths.CONTROL | paths.GENERATION
Routes = Callable[[APIRouter, Server], None]


def build_app(
    server: Server, protocols: Mapping[str, ApiProtocol], routes: Sequence[Routes] = ()
) -> ASGIApp:
    """Build the application.

    Args:
        server: State that the routes share.
        protocols: Protocol of each path that accepts a POST.
        routes: Functions that add further routes. Their errors use the format of the path's
            protocol.
    """
    return in_layers(
        build_routes(server, protocols, routes),
        server.config,
        server.lifecycle.require_ready,
        server.answered,
    )


def build_routes(
    server: Server, protocols: Mapping[str, ApiProtocol], routes: Sequence[Routes] = ()
) -> FastAPI:
    """Build the routes without the layers, for `/openapi.json` and for tests."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with server.running():
            yield

    root = server.config.root_path
    app = FastAPI(
        title="nano-inference",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        servers=[{"url": root}] if root else None,
    )
    app.state.rl = server.config.rl
    for path, protocol in protocols.items():
        app.add_api_route(
            path,
            generation_route(server, protocol),
            methods=["POST"],
            openapi_extra=dict(protocol.openapi),
        )
    for make in routes:
        make(app.router, server)
    for kind in (
        ApiError,
        NanoInferenceError,
        TimeoutError,
        HTTPException,
        RequestValidationError,
        Exception,
    ):
        app.add_exception_handler(kind, _answer_to)
    return app


async def _answer_to(request: Request, problem: Exception) -> Response:
    """Answer an error of a route or the router in the path's format, never in FastAPI's."""
    match problem:
        case HTTPException(status_code=404) if (
            request.url.path in TRAINERS and not request.app.state.rl
        ):
            error = ApiError(
                404, "this route is for trainers: start the server with --rl to enable it."
            )
        case HTTPException(status_code=404):
            error = no_route(request.url.path)
        case HTTPException(status_code=405):
            text = f"{shown(request.url.path)} does not support the method {shown(request.method)}."
            error = ApiError(405, text, headers=problem.headers or {})
        case HTTPException():
            error = ApiError(
                problem.status_code, str(problem.detail), headers=problem.headers or {}
            )
        case RequestValidationError():
            first = problem.errors()[0]
            where = ".".join(str(part) for part in first["loc"][1:])
            error = ApiError(400, f"{where or 'the body'}: {first['msg']}.", param=where or None)
        case TimeoutError():
            error = ApiError(504, "the engine did not answer in time.", headers=NO_RETRY)
        case _:
            error = api_error_of(problem)
    return error_reply_to(request, error)
