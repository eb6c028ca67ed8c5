"""Routes of the page: `/`, `/docs`, the files that they use, and `/page/settings`.

The page and its files are the same for everyone and do not reveal the served model, so they need no
key. The page's own requests need a key like any client's. It calls no route that changes the
engine.
"""

import re
from html import escape
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from nano_inference.server import paths
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.http.replies import json_reply
from nano_inference.server.page.api_docs import docs_page, routes_of
from nano_inference.server.server import Server, served_by
from nano_inference.types import SamplingParams

FILES = Path(__file__).parent / "files"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HOST = re.compile(r"[A-Za-z0-9.\-]+(:\d+)?|\[[0-9A-Fa-f:]+\](:\d+)?")
# Scripts and styles come only from this server and are never inline, and no text is parsed as HTML.
# Other sites cannot frame the page, or keep a handle to its window.
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes(router: APIRouter, server: Server) -> None:
    """Add the routes of the page."""
    root = escape(server.config.root_path)
    page = _below(root, (FILES / "index.html").read_text(encoding="utf-8"))

    @router.get("/", summary="Get the page in browsers, otherwise the list of routes as JSON")
    async def index(request: Request) -> Response:
        vary = {"vary": "accept"}
        if "text/html" in request.headers.get("accept", ""):
            return Response(page, headers=HEADERS | vary, media_type=_TYPES[".html"])
        about = {"name": "nano-inference", "status": server.lifecycle.status}
        routes = {
            f"{method} {path}": summary
            for path, methods in routes_of(request.app).items()
            for method, summary in methods.items()
        }
        return json_reply(200, about | {"routes": routes}, vary)

    @router.get("/docs", summary="Get the routes with examples, for browsers")
    async def docs(request: Request) -> Response:
        text = docs_page(routes_of(request.app), _address(request, root))
        return Response(_below(root, text), headers=HEADERS, media_type=_TYPES[".html"])

    @router.get("/page/settings", include_in_schema=False)
    async def settings(request: Request) -> Response:
        name = request.query_params.get("model")
        loaded = {served.name: served for served in map(served_by, server.pool.loaded)}
        if server.pool.stays_loaded:
            loaded = {"": server.require_served()}
        served = loaded.get(name or "", next(iter(loaded.values()), None))
        if served is None:  # all models are unloaded
            return json_reply(200, {"model": name or server.pool.models[0].name})
        return json_reply(200, page_settings(served))

    for name in paths.PAGE_FILES:
        _add_file(router, name)


# fields of the page that show a default while they are empty
_SHOWN = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def page_settings(served: Served) -> dict[str, Any]:
    """Return the model's values that the page shows, and the defaults for empty settings, which are
    those of `generate` and `chat`.
    """
    engine = served.engine
    sampling = {name: getattr(SamplingParams(), name) for name in _SHOWN}
    return {
        "model": served.name,
        "dtype": engine.dtype,
        "quantization": engine.quantization,
        "max_model_len": engine.max_model_len,
        "max_samples": served.config.max_samples,
        "eos_token_ids": engine.eos_token_ids,
        "sampling": {**sampling, **served.defaults_for_people},
    }


def _add_file(router: APIRouter, name: str) -> None:
    content = (FILES / name).read_bytes()

    @router.get(f"/page/{name}", name=name, include_in_schema=False)
    async def file() -> Response:
        return Response(content, headers=HEADERS, media_type=_TYPES[Path(name).suffix])


def _below(root: str, page: str) -> str:
    """Prefix a page's links with the path prefix of a proxy."""
    return page.replace('href="/', f'href="{root}/').replace('src="/', f'src="{root}/')


def _address(request: Request, root: str) -> str:
    """Return this server's address as the client knows it, for the examples."""
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        host = "127.0.0.1:8000"
    return f"{request.url.scheme}://{host}{root}"
