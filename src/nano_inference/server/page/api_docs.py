"""`/docs`: every route of a server, with examples for curl and Python, from one table.

Routes, methods and summaries come from the application itself, so that no route is listed that does
not exist. A test compares the table with the application. All clients get the same text. `docs.js`
fills in the model's name and sends examples.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from nano_inference.server import paths
from nano_inference.server.control.requests.table import ROUTES
from nano_inference.server.http.layers import LEVELS, Level

# path -> method -> summary
Routes = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Example:
    """Example of a call.

    Attributes:
        path: Path of the route.
        about: Short description of the call.
        body: Body of a POST. None: a GET.
        call: Function of the Python client. Empty: the example uses httpx.
    """

    path: str
    about: str
    body: Mapping[str, Any] | None = None
    call: str = ""


@dataclass(frozen=True)
class Family:
    """Group of related routes.

    Attributes:
        title: Heading of the group.
        about: Purpose of the routes.
        paths: Paths in order. A server may lack some.
        examples: Example calls.
        client: Python lines that make `client`, with the placeholders `URL` and `KEY`.
    """

    title: str
    about: str
    paths: Sequence[str]
    examples: Sequence[Example]
    client: str = ""


_QUESTION = [{"role": "user", "content": "What is 2+2?"}]
_SAMPLING = {"temperature": 0.8, "max_new_tokens": 16, "sampling_seed": 1}


def _control_paths(family: str) -> Sequence[str]:
    return tuple(dict.fromkeys(route.path for route in ROUTES if route.family == family))


FAMILIES = (
    Family(
        "OpenAI: chats, completions and responses",
        "The same seed, prompt and weights give the same tokens, regardless of the server's load. "
        "model is a name from /v1/models, or an adapter's; it is optional.",
        (
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/responses/{name}",
            "/v1/responses/{name}/cancel",
            "/v1/responses/{name}/input_items",
            "/v1/embeddings",
            "/v1/models",
            "/v1/models/{name}",
        ),
        (
            Example(
                "/v1/chat/completions",
                "Answer a chat, each token with its logprob and two alternatives",
                {
                    "model": "MODEL",
                    "messages": _QUESTION,
                    "max_tokens": 16,
                    "seed": 1,
                    "logprobs": True,
                    "top_logprobs": 2,
                },
                "client.chat.completions.create",
            ),
            Example(
                "/v1/completions",
                "Continue a text, twice",
                {
                    "model": "MODEL",
                    "prompt": "The sky is blue because",
                    "n": 2,
                    "max_tokens": 16,
                    "seed": 1,
                    "logprobs": 2,
                },
                "client.completions.create",
            ),
            Example(
                "/v1/responses",
                "Create a response",
                {"model": "MODEL", "input": "Name three rivers.", "max_output_tokens": 16},
                "client.responses.create",
            ),
            Example(
                "/v1/embeddings",
                "Embed a text",
                {"model": "MODEL", "input": "The sky is blue"},
                "client.embeddings.create",
            ),
            Example("/v1/models", "List the model and its adapters"),
        ),
        'from openai import OpenAI\n\nclient = OpenAI(base_url="URL/v1", api_key="KEY")',
    ),
    Family(
        "Anthropic: messages",
        "For Anthropic's clients.",
        (
            "/v1/messages",
            "/v1/messages/count_tokens",
        ),
        (
            Example(
                "/v1/messages",
                "Answer a message",
                {"model": "MODEL", "max_tokens": 16, "messages": _QUESTION},
                "client.messages.create",
            ),
            Example(
                "/v1/messages/count_tokens",
                "Count the tokens of a prompt",
                {"model": "MODEL", "messages": _QUESTION},
                "client.messages.count_tokens",
            ),
        ),
        'from anthropic import Anthropic\n\nclient = Anthropic(base_url="URL", api_key="KEY")',
    ),
    Family(
        "Sessions: turns of a conversation",
        "The server keeps a conversation as token ids. A turn sends only its new messages.",
        (
            "/sessions",
            "/sessions/{name}",
            "/sessions/{name}/tokens",
            "/sessions/{name}/messages",
            "/sessions/{name}/chat/completions",
            "/sessions/{name}/fork",
            "/sessions/{name}/prefetch",
            "/requests",
        ),
        (
            Example("/sessions", "Open a session", {"messages": _QUESTION}),
            Example("/requests", "List open requests and why they wait"),
        ),
    ),
    Family(
        "Ollama: chats and completions",
        "For Ollama's clients. Streams are lines of JSON. This server does not download or change "
        "models.",
        (
            "/api/chat",
            "/api/generate",
            "/api/embed",
            "/api/embeddings",
            "/api/tags",
            "/api/ps",
            "/api/show",
            "/api/version",
            "/api/pull",
            "/api/push",
            "/api/create",
            "/api/copy",
            "/api/delete",
        ),
        (
            Example(
                "/api/chat",
                "Answer a chat",
                {"model": "MODEL", "messages": _QUESTION, "options": {"num_predict": 16}},
                "client.chat",
            ),
            Example("/api/tags", "List the models"),
        ),
        'from ollama import Client\n\nclient = Client(host="URL")',
    ),
    Family(
        "Models",
        "Load and unload models of a server with several, as with llama.cpp's server. These routes "
        "need the admin key. A request loads its model by itself.",
        ("/models/load", "/models/unload"),
        (Example("/models/load", "Load a model", {"model": "MODEL"}),),
    ),
    Family(
        "SGLang and vLLM: token ids for trainers",
        "Send text or token ids; get token ids, logprobs and weight versions. These routes need "
        "--rl.",
        (
            "/generate",
            "/inference/v1/generate",
        ),
        (
            Example(
                "/generate",
                "Continue a text, as SGLang does",
                {
                    "text": "The sky is blue because",
                    "sampling_params": _SAMPLING,
                    "return_logprob": True,
                },
            ),
            Example(
                "/inference/v1/generate",
                "Continue token ids, as vLLM does",
                {
                    "token_ids": [504, 3575, 282, 4649, 314],
                    "sampling_params": {"temperature": 0.8, "max_tokens": 16, "seed": 1},
                },
            ),
        ),
    ),
    Family(
        "Weights",
        "Pause, change the weights, resume; running requests keep their tokens. These routes need "
        "--rl. If the server has an admin key, those that change the engine require it. Otherwise "
        "they reject web pages.",
        _control_paths("weights"),
        (
            Example("/get_weight_version", "Get the weight version"),
            Example(
                "/update_weights_from_disk",
                "Load the safetensors of a folder as version 42",
                {"model_path": "/models/step-42", "weight_version": "42"},
            ),
            Example("/pause_generation", "Pause between two steps", {"mode": "in_place"}),
            Example("/continue_generation", "Resume", {}),
        ),
    ),
    Family(
        "Adapters",
        "LoRA adapters of the model. Requests select one by model. These routes need --rl.",
        _control_paths("adapters"),
        (
            Example(
                "/v1/load_lora_adapter",
                "Load an adapter",
                {"lora_name": "poet", "lora_path": "/adapters/poet"},
            ),
            Example("/v1/unload_lora_adapter", "Unload an adapter", {"lora_name": "poet"}),
        ),
    ),
    Family(
        "Requests, memory and state for trainers",
        "These routes need --rl.",
        _control_paths("state"),
        (
            Example("/server_info", "Get device, dtype and version"),
            Example("/abort_request", "End all requests", {"abort_all": True}),
        ),
    ),
    Family(
        "Tokens",
        "Convert text to token ids and back.",
        (
            "/tokenize",
            "/detokenize",
        ),
        (
            Example("/tokenize", "Tokenize a text", {"prompt": "Hello world"}),
            Example("/detokenize", "Convert token ids to text", {"tokens": [19556, 905]}),
        ),
    ),
    Family(
        "Metrics and health",
        "/health reports if the server is ready; /stats and /metrics report its activity.",
        (
            "/health",
            "/ping",
            "/load",
            "/stats",
            "/metrics",
            "/version",
            "/",
            "/docs",
        ),
        (
            Example("/health", "Check that the server is ready; needs no key"),
            Example("/metrics", "Get metrics in Prometheus's format"),
            Example("/stats", "Get the counters of the engine and the queue"),
        ),
    ),
    Family(
        "Administration",
        "These routes need the admin key. Those of the fleet exist only with --replicas.",
        (
            "/flush_cache",
            "/fleet",
            "/fleet/add",
            "/fleet/drain",
            "/fleet/remove",
        ),
        (
            Example("/flush_cache", "Drop cached prefixes", {}),
            Example("/fleet", "List the replicas"),
            Example(
                "/fleet/drain",
                "Send a replica no new requests",
                {"replica": "0", "move": True},
            ),
        ),
    ),
)


def routes_of(app: FastAPI) -> Routes:
    """Return an application's documented routes, by path and method."""
    routes: dict[str, dict[str, str]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            methods = dict.fromkeys(sorted(route.methods or ()), _summary(route))
            routes.setdefault(route.path_format, {}).update(methods)
    return routes


def _summary(route: APIRoute) -> str:
    return route.summary or (route.openapi_extra or {}).get("summary", "")


def docs_page(routes: Routes, address: str) -> str:
    """Return the page as HTML.

    Args:
        routes: Routes of the server. Rows of the table for other routes are left out.
        address: Address of the server for the examples.
    """
    there = [family for family in FAMILIES if any(path in routes for path in family.paths)]
    index = "".join(f"<a href='#{_slug(each)}'>{escape(each.title)}</a>" for each in there)
    families = "".join(_family(each, routes, address) for each in there)
    return _PAGE.format(index=index, families=families)


def can_be_tried(example: Example) -> bool:
    """Return True if the page may send the example: its route changes nothing."""
    level = LEVELS.get(example.path, Level.KEY)
    return level is not Level.ADMIN and example.path not in paths.CHANGING


def _slug(family: Family) -> str:
    return re.sub(r"[^a-z]+", "-", family.title.lower())


def curl(example: Example, address: str) -> str:
    """Return the call as a shell command."""
    if example.body is None:
        return f"curl {address}{example.path}"
    return f"curl {address}{example.path} -d '{json.dumps(example.body, indent=4)}'"


def python(example: Example, family: Family, address: str) -> str:
    """Return the call as a Python program."""
    if example.call:
        client = family.client.replace("URL", address)
        body = example.body or {}
        arguments = "".join(f"    {name}={value!r},\n" for name, value in body.items())
        return f"{client}\nprint({example.call}(\n{arguments}))"
    url = json.dumps(address + example.path)
    if example.body is None:
        return f"import httpx\n\nprint(httpx.get({url}).text)"
    return (
        f"import httpx\n\nbody = {dict(example.body)!r}\nprint(httpx.post({url}, json=body).text)"
    )


def _family(family: Family, routes: Routes, address: str) -> str:
    rows = "".join(
        f"<tr><td><code>{method} {escape(path)}</code></td><td>{escape(summary)}</td></tr>"
        for path in family.paths
        if path in routes
        for method, summary in routes[path].items()
    )
    examples = "".join(
        _example(each, family, address) for each in family.examples if each.path in routes
    )
    return (
        f"<section class='card' id='{_slug(family)}'><h2>{escape(family.title)}</h2>"
        f"<p class='note'>{escape(family.about)}</p>"
        f"<div class='scrolls'><table>{rows}</table></div>{examples}</section>"
    )


def _example(example: Example, family: Family, address: str) -> str:
    data = ""
    if can_be_tried(example):
        body = "" if example.body is None else json.dumps(example.body, indent=2)
        data = f" data-path='{escape(example.path)}' data-body='{escape(body)}'"
    return (
        f"<article class='example-call'{data}><h3>{escape(example.about)}</h3>"
        f"{_code('curl', curl(example, address))}"
        f"{_code('Python', python(example, family, address))}</article>"
    )


def _code(language: str, text: str) -> str:
    return (
        f"<figure class='code'><figcaption><span>{language}</span></figcaption>"
        f"<pre tabindex='0'>{escape(text)}</pre></figure>"
    )


_PAGE = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <title>API · nano-inference</title>
    <link rel="icon" href="/page/icon.svg" type="image/svg+xml">
    <link rel="stylesheet" href="/page/style.css">
    <link rel="stylesheet" href="/page/chat.css">
    <script type="module" src="/page/docs.js"></script>
  </head>
  <body>
    <header>
      <h1>nano-inference</h1>
      <nav aria-label="Views">
        <a href="/#/chat">Chat</a>
        <a href="/#/samples">Samples</a>
        <a href="/#/dashboard">Dashboard</a>
        <a href="/docs" aria-current="page">API</a>
      </nav>
    </header>
    <main id="docs">
      <p>API routes with examples. If the server has API keys, send one:
      <code>-H "Authorization: Bearer KEY"</code> with curl, <code>headers</code> with httpx. All
      fields are in <a href="/openapi.json">/openapi.json</a>.</p>
      <nav id="index" aria-label="Contents">{index}</nav>
      {families}
    </main>
  </body>
</html>
"""
