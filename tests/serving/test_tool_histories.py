"""Agents on a model whose template renders no tools: they get text, and their second turn is
answered.
"""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nano_inference.serving.config import ServerConfig
from nano_inference.serving.main import running_server
from nano_inference.serving.protocols import requests
from tests.serving.scripted import ScriptedClient

FUNCTION = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {}},
}
TOOL = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "Weather?"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
ANTHROPIC = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
ANTHROPIC_TOOL = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": FUNCTION["parameters"],
}
RENDERED = (
    '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": '
    '"Paris"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def engine() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture(scope="module")
def client(engine: ScriptedClient) -> Iterator[httpx.Client]:
    config = ServerConfig(port=0, in_process=True, served_model_name="m")
    with running_server(engine, config) as url, httpx.Client(base_url=url) as client:
        yield client


def prompt(engine: ScriptedClient) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_a_call_in_the_history(
    content: dict[str, Any], client: httpx.Client, engine: ScriptedClient
) -> None:
    asking = {"role": "assistant", "tool_calls": [CALL], **content}
    answer = client.post(
        "/v1/chat/completions", json={"model": "m", "messages": [USER, asking, HISTORY[2]]}
    )
    assert answer.status_code == 200, answer.text
    assert prompt(engine).endswith(RENDERED)


def test_a_call_in_anthropics_history(client: httpx.Client, engine: ScriptedClient) -> None:
    answer = client.post(
        "/v1/messages", json={"model": "m", "messages": ANTHROPIC, "max_tokens": 4}
    )
    assert answer.status_code == 200, answer.text
    assert prompt(engine).endswith(RENDERED)


def test_tools_are_answered_with_text(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    requests._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "nano_inference.serving"):
        for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
            body = {"model": "m", "messages": HISTORY, "tools": [TOOL], **choice}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == "Hello there."
            assert client.post("/tokenize", json=body).status_code == 200
        body = {"model": "m", "messages": ANTHROPIC, "tools": [ANTHROPIC_TOOL], "max_tokens": 4}
        assert client.post("/v1/messages", json=body).status_code == 200
        assert client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 5
    assert sum("offers tools" in record.getMessage() for record in caplog.records) == 1


def test_a_call_cannot_be_forced(client: httpx.Client) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = {"model": "m", "messages": HISTORY, "tools": [TOOL], "tool_choice": choice}
        answer = client.post("/v1/chat/completions", content=json.dumps(body))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tool_choice"
