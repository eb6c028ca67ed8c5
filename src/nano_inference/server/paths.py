"""The paths of the dialects and of the page, by which access and the shape of errors go."""

from typing import Any

from nano_inference.server.control.requests.table import ROUTES, paths_for
from nano_inference.server.errors import ApiError, anthropic_error, openai_error

CHANGING = paths_for("admin")  # they change the engine, or reveal its weights
READING = paths_for("user")
OPEN = paths_for("all")
# Their bodies hold a model's tensors.
WITH_WEIGHTS: frozenset[str] = frozenset(route.path for route in ROUTES if route.files)
CONTROL = CHANGING | READING | OPEN
# The server's page: the same for all, so open to all; it asks for a key where a route wants one.
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
    "samples.js",
    "server.js",
    "settings.js",
    "store.js",
    "style.css",
    "tips.js",
)
PAGE: frozenset[str] = frozenset(("/", "/docs", *(f"/page/{name}" for name in PAGE_FILES)))
# They generate; for users.
GENERATION: frozenset[str] = frozenset(("/generate", "/inference/v1/generate"))


def error_body(
    path: str, problem: ApiError, request_id: str, *, has_version: bool = False
) -> dict[str, Any]:
    """In the shape of the protocol that a path speaks: Anthropic's below `/v1/messages`, elsewhere
    OpenAI's.

    `/v1/models` speaks both: Anthropic's where there is an `anthropic-version` header
    (`has_version`). Trainers' routes say beside it what SGLang's clients look for.
    """
    route = "/".join(path.split("/", 3)[:3])
    if route == "/v1/messages" or (route == "/v1/models" and has_version):
        return anthropic_error(problem, request_id)
    if path in CONTROL or path in GENERATION:
        return openai_error(problem) | {"success": False, "message": problem.message}
    return openai_error(problem)
