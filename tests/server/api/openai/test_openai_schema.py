"""Every reply is valid under OpenAI's published document (`openai_schema.json` names its
source).
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator, ValidationError

from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.server.scripted import (
    TEMPLATE,
    THINKS_AND_CALLS,
    TOOLS,
    Script,
    ScriptedClient,
    with_template,
)
from tests.server.streams import events, post

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 20}
STREAMS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
BOTH: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"stop": "e"},
    {"max_tokens": 1},
    {"return_token_ids": True, "seed": 1},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"tools": TOOLS},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 2},
    {"echo": True, "logprobs": 1},
    {"prompt": ["a", "b"]},
]


def _published() -> dict[str, Any]:
    """Return the schemas, with changes from other parts of the document and from OpenAI's
    practice.
    """
    schemas = json.loads((Path(__file__).parent / "openai_schema.json").read_text())["components"][
        "schemas"
    ]
    completion = schemas["CreateCompletionResponse"]["properties"]
    choice = completion["choices"]["items"]["properties"]
    scores = choice["logprobs"]["anyOf"][0]["properties"]
    nulls = [
        # the prompt's first token
        *(scores["token_logprobs"]["items"], scores["top_logprobs"]["items"]),
        *(choice["finish_reason"], completion["usage"]),  # events before the last one
    ]
    for schema in nulls:
        schema["nullable"] = True
    return _with_nulls(schemas)


def _with_nulls(schema: Any) -> Any:
    """Replace `nullable` by JSON Schema's null type."""
    if isinstance(schema, list):
        return [_with_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_nulls(each) for key, each in schema.items() if key != "nullable"}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner


COMPONENTS = {"schemas": _published()}


def valid(name: str, reply: object) -> None:
    Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": COMPONENTS}
    ).validate(reply)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedClient:
    return ScriptedClient(
        tokenizer_folder=with_template(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)
    )


@pytest.fixture(scope="module")
def url(engine: ScriptedClient) -> Iterator[str]:
    with running_server(
        engine, ServerConfig(port=0, in_process=True, served_model_name="m")
    ) as url:
        yield url


@pytest.mark.thorough
@pytest.mark.parametrize("says", ["Hi there 🙂", THINKS_AND_CALLS])
def test_chats(url: str, engine: ScriptedClient, says: str) -> None:
    engine.script = Script(says, cached_tokens=1)
    path = f"{url}/v1/chat/completions"
    for (one, other), options in zip(
        itertools.product(BOTH, CHATS), itertools.cycle(STREAMS), strict=False
    ):
        valid("CreateChatCompletionResponse", post(path, HELLO | one | other))
        for chunk in events(path, HELLO | one | other | options):
            valid("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.thorough
def test_completions(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("Hi there 🙂", cached_tokens=1)
    path = f"{url}/v1/completions"
    for (one, other), options in zip(
        itertools.product(BOTH, COMPLETIONS), itertools.cycle(STREAMS), strict=False
    ):
        valid("CreateCompletionResponse", post(path, PROMPT | one | other))
        for chunk in events(path, PROMPT | one | other | options):
            valid("CreateCompletionResponse", chunk)


@pytest.mark.thorough
def test_models_and_errors(url: str, engine: ScriptedClient) -> None:
    valid("ListModelsResponse", httpx.get(f"{url}/v1/models").json())
    valid("Model", httpx.get(f"{url}/v1/models/m").json())
    for path, body in (("completions", {}), ("chat/completions", {"model": "x"}), ("nothing", {})):
        valid("ErrorResponse", httpx.post(f"{url}/v1/{path}", json=body).json())
    engine.script = Script("One two three", fail_after=2)
    last = httpx.post(f"{url}/v1/chat/completions", json=HELLO | {"stream": True}).text.split(
        "\n\n"
    )[-2]
    valid("ErrorResponse", json.loads(last.removeprefix("data: ")))


def test_invalid_reply_is_rejected_by_the_schema() -> None:
    with pytest.raises(ValidationError):
        valid(
            "CreateChatCompletionResponse",
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m"},
        )
    with pytest.raises(ValidationError):
        valid(
            "CreateChatCompletionStreamResponse", {"choices": [{"index": 0, "finish_reason": None}]}
        )
