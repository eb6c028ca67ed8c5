"""The routes of the page: `/`, `/docs` and the files that they name, and `/page/settings`.

The first are the same for everybody and do not say what is served, so they are open to all; the
page's own requests need a key where any client's do. It calls no route that changes the engine.
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
from nano_inference.server.server import Server
from nano_inference.types import SamplingParams

FILES = Path(__file__).parent / "files"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HOST = re.compile(r"[A-Za-z0-9.\-]+(:\d+)?|\[[0-9A-Fa-f:]+\](:\d+)?")
# Scripts and styles come from here alone, none stands in the page, no text is ever read as HTML,
# and no other site may show the page in a frame, or open it and hold on to it.
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
    """The routes."""
    root = escape(server.config.root_path)
    page = _below(root, (FILES / "index.html").read_text(encoding="utf-8"))

    @router.get("/", summary="The page, for browsers; for others the routes, as JSON")
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

    @router.get("/docs", summary="The routes with examples, for browsers")
    async def docs(request: Request) -> Response:
        text = docs_page(routes_of(request.app), _address(request, root))
        return Response(_below(root, text), headers=HEADERS, media_type=_TYPES[".html"])

    @router.get("/page/settings", include_in_schema=False)
    async def settings() -> Response:
        return json_reply(200, page_settings(server.require_served()))

    for name in paths.PAGE_FILES:
        _add_file(router, name)


# Empty fields of the page that have a default.
_SHOWN = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def page_settings(served: Served) -> dict[str, Any]:
    """Values of the model that the page shows, and what the page samples with if its settings are
    empty: the defaults of `generate` and `chat`.
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
    """The page with its own links below what a proxy leaves before the paths."""
    return page.replace('href="/', f'href="{root}/').replace('src="/', f'src="{root}/')


def _address(request: Request, root: str) -> str:
    """Where the client has found this server, as examples write it."""
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        host = "127.0.0.1:8000"
    return f"{request.url.scheme}://{host}{root}"
