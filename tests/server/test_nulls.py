"""Only vLLM's clients get nulls that OpenAI does not send."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from nano_inference.server.api.openai.models import (
    BEYOND_OPENAI,
    ChatRequest,
    CompletionRequest,
)
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.server.scripted import TEMPLATE, TOOLS, Script, ScriptedClient, with_template

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETION: {"prompt": "Hi"},
}
# Requests of OpenAI's clients, each with another path through the builders.
PLAIN: list[tuple[str, dict[str, Any]]] = [
    *((path, {}) for path in BODIES),
    *((path, {"n": 2, "max_tokens": 2, "stop": "x", "seed": 5}) for path in BODIES),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"tools": TOOLS}),
    (COMPLETION, {"logprobs": 1, "echo": True}),
    (COMPLETION, {"max_tokens": 0}),
]
OPENAIS = {"logprobs", "refusal", "finish_reason", "usage", "content"}
OPENAIS |= {"token_logprobs", "top_logprobs"}  # the first token, with `echo`
BOTH = {"token_ids", "prompt_token_ids", "prompt_logprobs", "routed_experts", "stop_reason"}
WHOLE = {
    CHAT: BOTH | {"kv_transfer_params", "reasoning", "reasoning_content"},
    COMPLETION: BOTH | {"kv_transfer_params"},
}
STREAMED = {CHAT: {"token_ids", "prompt_token_ids", "stop_reason"}, COMPLETION: BOTH}


@pytest.fixture(scope="module", params=[False, True], ids=["serving", "with --rl"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, bool]]:
    folder = with_template(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)
    engine = ScriptedClient(tokenizer_folder=folder, script=Script("One two"))
    with running_server(engine, ServerConfig(port=0, rl=request.param)) as url:
        yield url, request.param


def nulls(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(nulls, value))
    if not isinstance(value, dict):
        return set()
    own = {name for name, each in value.items() if each is None}
    return own.union(*map(nulls, value.values()))


def whole(url: str, path: str, more: dict[str, Any]) -> set[str]:
    reply = httpx.post(url + path, json=BODIES[path] | more)
    assert reply.status_code == 200, reply.text
    return nulls(reply.json())


def streamed(url: str, path: str, more: dict[str, Any]) -> set[str]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = httpx.post(url + path, json=BODIES[path] | more | options)
    assert reply.status_code == 200, reply.text
    events = [each.removeprefix("data: ") for each in reply.text.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    return nulls([json.loads(each) for each in events[:-2]])


@pytest.mark.parametrize(("path", "more"), PLAIN)
def test_openai_clients_get_openai_nulls_unless_rl_is_on(
    server: tuple[str, bool], path: str, more: dict[str, Any]
) -> None:
    url, rl = server
    for found in (whole(url, path, more), streamed(url, path, more)):
        assert (found <= OPENAIS) != rl
    assert "usage" in streamed(url, path, more)  # events before the last one


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "more",
    [{"return_token_ids": False}, {"top_k": 5}, {"min_tokens": 1}, {"skip_special_tokens": None}],
)
def test_requests_of_vllms_clients_get_vllms_nulls(
    server: tuple[str, bool], path: str, more: dict[str, Any]
) -> None:
    url, _ = server
    assert whole(url, path, more) >= WHOLE[path]
    assert streamed(url, path, more) >= STREAMED[path]


def test_fields_of_openais_client_are_no_sign_of_vllm() -> None:
    """The table agrees with the parameters of OpenAI's client."""
    known = {
        *chat_params.CompletionCreateParamsNonStreaming.__annotations__,
        *completion_params.CompletionCreateParamsNonStreaming.__annotations__,
    }
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert {"top_k", "return_token_ids"} <= fields - known == BEYOND_OPENAI
