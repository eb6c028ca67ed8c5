"""Agents on a model whose template renders no tools: they get text, and their second turn
succeeds.
"""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nano_inference.server.api.shared import prompts
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.server.scripted import Script, ScriptedClient, with_template

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
def test_call_in_the_history(
    content: dict[str, Any], client: httpx.Client, engine: ScriptedClient
) -> None:
    asking = {"role": "assistant", "tool_calls": [CALL], **content}
    answer = client.post(
        "/v1/chat/completions", json={"model": "m", "messages": [USER, asking, HISTORY[2]]}
    )
    assert answer.status_code == 200, answer.text
    assert prompt(engine).endswith(RENDERED)


def test_call_in_anthropics_history(client: httpx.Client, engine: ScriptedClient) -> None:
    answer = client.post(
        "/v1/messages", json={"model": "m", "messages": ANTHROPIC, "max_tokens": 4}
    )
    assert answer.status_code == 200, answer.text
    assert prompt(engine).endswith(RENDERED)


def test_tools_are_answered_with_text(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    prompts._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "nano_inference.server"):
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


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_call_is_read_as_hermes_writes_it(
    engine: ScriptedClient, client: httpx.Client, choice: dict[str, Any]
) -> None:
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    before, engine.script = engine.script, Script(said)
    try:
        body = {"model": "m", "messages": HISTORY, "tools": [TOOL], **choice}
        answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        assert answer["finish_reason"] == "tool_calls"
        text = client.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).json()
        assert text["choices"][0]["message"]["content"] == said
        body = {"model": "m", "messages": ANTHROPIC, "tools": [ANTHROPIC_TOOL], "max_tokens": 64}
        reply = client.post("/v1/messages", json=body).json()
        assert [each["type"] for each in reply["content"]] == ["tool_use"]
    finally:
        engine.script = before


def test_call_is_forced_as_hermes_writes_it(engine: ScriptedClient, client: httpx.Client) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = {"model": "m", "messages": HISTORY, "tools": [TOOL], "tool_choice": choice}
        answer = client.post("/v1/chat/completions", content=json.dumps(body))
        assert answer.status_code == 200, answer.text
        grammar = engine.requests[-1].params.grammar
        assert grammar is not None
        assert "<tool_call>" in grammar.text


# as in Mistral and Qwen 3.5: a system message only at the start, users and assistants alternate,
# calls and results do not count
STRICT = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}"
    "[{{ m.role }}]{% for c in m.tool_calls or [] %}<c>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</c>{% endfor %}{{ m.content or '' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedClient, str]]:
    folder = with_template(tmp_path_factory.mktemp("strict"), STRICT)
    engine = ScriptedClient(tokenizer_folder=folder, max_model_len=4096)
    config = ServerConfig(port=0, in_process=True, served_model_name="m")
    with running_server(engine, config) as url:
        yield engine, url


TEXT = {"type": "text", "text": "And?"}
SYSTEM = {"role": "system", "content": "Be brief."}
SHOWN = '[assistant]<c>weather{"city": "Paris"}</c>[tool]rain'


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        (
            "messages",
            {"messages": [*ANTHROPIC[:2], {"role": "user", "content": [RESULT, TEXT]}]},
            f"[user]Weather?{SHOWN}\nAnd?",
        ),
        (
            "messages",
            {"messages": [*ANTHROPIC[:2], {"role": "user", "content": [TEXT, RESULT]}]},
            f"[user]Weather?{SHOWN}\nAnd?",
        ),
        (
            "messages",
            {"system": "Short.", "messages": [*ANTHROPIC, SYSTEM]},
            f"[system]Short.[user]Weather?{SHOWN}\nBe brief.",
        ),
        (
            "messages",
            {"system": "Short.", "messages": [USER, SYSTEM]},
            "[system]Short.[user]Weather?\nBe brief.",
        ),
        (
            "chat/completions",
            {"messages": [*HISTORY, {"role": "user", "content": "And?"}]},
            f"[user]Weather?{SHOWN}\nAnd?",
        ),
        (
            "chat/completions",
            {"messages": [SYSTEM, SYSTEM | {"role": "developer"}, USER]},
            "[system]Be brief.\n\nBe brief.[user]Weather?",
        ),
        (
            "responses",
            {"input": [USER, {"role": "assistant", "content": "Rain."}, SYSTEM, USER]},
            "[user]Weather?[assistant]Rain.[user]Be brief.\nWeather?",
        ),
        (
            "responses",
            {"instructions": "Short.", "input": [USER, SYSTEM | {"role": "developer"}]},
            "[system]Short.[user]Weather?\nBe brief.",
        ),
    ],
)
def test_turns_go_where_the_template_renders_them(
    strict: tuple[ScriptedClient, str], path: str, body: dict[str, Any], shown: str
) -> None:
    engine, url = strict
    limit = {"max_tokens": 4} if path == "messages" else {}
    reply = httpx.post(f"{url}/v1/{path}", json={"model": "m", **limit, **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False)
    assert prompt == shown
