"""Paths of the dialects and the page, which decide access and the format of errors."""

from typing import Any

from nano_inference.server.control.requests.table import ROUTES, paths_for
from nano_inference.server.errors import ApiError, anthropic_error, ollama_error, openai_error

CHANGING = paths_for("admin")  # change the engine, or reveal its weights
READING = paths_for("user")
OPEN = paths_for("all")
# Their bodies hold tensors of a model.
WITH_WEIGHTS: frozenset[str] = frozenset(route.path for route in ROUTES if route.files)
CONTROL = CHANGING | READING | OPEN
# The server's page is open to all, and asks for a key when a route needs one.
PAGE_FILES = (
    "api.js",
    "charts.js",
    "chat.css",
    "chat.js",
    "conversations.js",
    "dashboard.js",
    "docs.js",
    "dom.js",
    "icon.svg",
    "links.js",
    "main.js",
    "markdown.js",
    "messages.js",
    "requests.js",
    "samples.js",
    "server.js",
    "settings.js",
    "store.js",
    "style.css",
    "tips.js",
)
PAGE: frozenset[str] = frozenset(("/", "/docs", *(f"/page/{name}" for name in PAGE_FILES)))
# Routes that generate, which users may call.
GENERATION: frozenset[str] = frozenset(("/generate", "/inference/v1/generate"))


def error_body(
    path: str, problem: ApiError, request_id: str, *, has_version: bool = False
) -> dict[str, Any]:
    """Return an error's body in the format of the path's protocol: Anthropic's below
    `/v1/messages`, Ollama's below `/api`, otherwise OpenAI's.

    `/v1/models` uses Anthropic's format if the request has an `anthropic-version` header
    (`has_version`). Trainers' routes add the fields that SGLang's clients read.
    """
    if path.startswith("/api/"):
        return ollama_error(problem)
    route = "/".join(path.split("/", 3)[:3])
    if route == "/v1/messages" or (route == "/v1/models" and has_version):
        return anthropic_error(problem, request_id)
    if path in CONTROL or path in GENERATION:
        return openai_error(problem) | {"success": False, "message": problem.message}
    return openai_error(problem)
