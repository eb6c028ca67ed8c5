"""Forced tool calls over HTTP: both dialects, streamed and whole."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer

from nano_inference.config import EngineConfig
from nano_inference.server.api.parsing.tool_formats import TOOL_FORMATS
from nano_inference.server.api.shared.sampling import may_ask_for_grammar
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama
from tests.server.streams import events, post

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": WEATHER,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
UNKNOWN = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
USER = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 400, "temperature": 1}
NAMED = {"type": "function", "function": {"name": "now"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def function(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def asks(choice: Any, *, strict: bool = True, **more: Any) -> dict[str, Any]:
    tools = [function(name, schema, strict=strict) for name, schema in SCHEMAS.items()]
    return CHAT | {"tools": tools, "tool_choice": choice} | more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tiny_llama(tmp_path_factory.mktemp("tools"), seed=0)
    write_tokenizer(folder, TEMPLATE)
    return folder


# a format for each encoding of arguments
FORMATS = ["hermes", "llama", "mistral", "qwen3_coder", "gemma4"]


@pytest.fixture(scope="module", params=FORMATS)
def url(model: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    config = EngineConfig(str(model), num_threads=1, kv_cache_memory=2**22, seed=0)
    server = ServerConfig(port=0, in_process=True, tool_format=request.param)
    with running_server(config, server) as url:
        yield url


def require_valid(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def whole(url: str, body: dict[str, Any]) -> tuple[Any, str, list[tuple[str, str]]]:
    """Return content, finish reason and calls."""
    choice = post(f"{url}/v1/chat/completions", body)["choices"][0]
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls", ())
    ]
    return choice["message"]["content"], choice["finish_reason"], calls


def streamed(url: str, body: dict[str, Any]) -> tuple[Any, str, list[tuple[str, str]]]:
    content, reason, calls = "", "", list[list[str]]()
    for event in events(f"{url}/v1/chat/completions", body):
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    return content or None, reason, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("name", ["gemma4", "kimi_k2", "mistral_args"])
def test_markers_may_be_special_tokens(name: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, seed=0)
    write_tokenizer(folder, TEMPLATE)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    form = TOOL_FORMATS[name]
    backend.add_special_tokens([each for each in form.markers if each[0] in "<["])
    backend.save(str(folder / "tokenizer.json"))
    config = EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**22, seed=0)
    with running_server(config, ServerConfig(port=0, in_process=True, tool_format=name)) as url:
        for read in (whole, streamed):
            for stop in (None, "@@"):
                body = asks("required", parallel_tool_calls=False, stop=stop)
                content, reason, calls = read(url, body)
                assert (content, reason, len(calls)) == (None, "tool_calls", 1)
                require_valid(calls)


def test_tool_that_no_call_can_carry_is_rejected_at_once(model: Path) -> None:
    config = EngineConfig(str(model), num_threads=1, kv_cache_memory=2**22, seed=0)
    server = ServerConfig(port=0, in_process=True, tool_format="qwen3_coder")
    odd = {"type": "object", "properties": {"a>": {"type": "integer"}}}
    with running_server(config, server) as url:
        for name, parameters, problem in (
            ("f", odd, "cannot carry the parameter 'a>' of tool 'f'"),
            ("f g", WEATHER, "cannot carry the name 'f g'"),
        ):
            body = CHAT | {"tools": [function(name, parameters)], "tool_choice": "auto"}
            error = post(f"{url}/v1/chat/completions", body, 400)["error"]
            assert problem in error["message"]
            assert error["param"] == "tools"


@pytest.fixture(scope="module")
def unknown_url(model: Path) -> Iterator[str]:
    """Run a server of a model whose template does not show its call format."""
    config = EngineConfig(str(model), num_threads=1, kv_cache_memory=2**22, seed=0)
    with running_server(config, ServerConfig(port=0, in_process=True)) as url:
        yield url


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ask", [whole, streamed], ids=["whole", "streamed"])
def test_call_is_forced_for_unknown_tool_formats(unknown_url: str, ask: Any, seed: int) -> None:
    """Force one call in Hermes' format: the model was not trained to stop."""
    for choice, names in (("required", {*SCHEMAS}), (NAMED, {"now"}), (ALLOWED, {"now"})):
        content, reason, calls = ask(unknown_url, asks(choice, seed=seed))
        assert (content, reason, len(calls)) == (None, "tool_calls", 1)
        require_valid(calls)
        assert {name for name, _ in calls} <= names
    content, reason, calls = ask(unknown_url, asks("auto", seed=seed, max_tokens=20))
    assert content
    assert calls == []


def test_anthropic_call_is_forced_for_unknown_tool_formats(
    unknown_url: str,
) -> None:
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    name = httpx.get(f"{unknown_url}/v1/models").json()["data"][0]["id"]
    body = CHAT | {"model": name, "tools": tools, "tool_choice": {"type": "any"}}
    message = post(f"{unknown_url}/v1/messages", body)
    (block,) = message["content"]
    assert (block["type"], message["stop_reason"]) == ("tool_use", "tool_use")
    jsonschema.validate(block["input"], SCHEMAS[block["name"]])


def test_calls_stay_text_if_the_server_is_configured_so(model: Path) -> None:
    config = EngineConfig(str(model), num_threads=1, kv_cache_memory=2**22, seed=0)
    server = ServerConfig(port=0, in_process=True, tool_format="none")
    with running_server(config, server) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=asks("required"), timeout=60)
    assert reply.status_code == 400
    assert "--tool-format" in reply.json()["error"]["message"]


@pytest.mark.thorough(
    cases=[
        "llama-whole-0",
        "llama-whole-2",
        "llama-streamed-0",
        "llama-streamed-1",
        "llama-streamed-2",
        "mistral-whole-2",
    ]
)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ask", [whole, streamed], ids=["whole", "streamed"])
def test_openai_calls_are_forced(url: str, ask: Any, seed: int) -> None:
    for choice, names in (("required", {*SCHEMAS}), (NAMED, {"now"}), (ALLOWED, {"now"})):
        one = asks(choice, seed=seed, parallel_tool_calls=False, strict=seed != 1)
        content, reason, calls = ask(url, one)
        assert (content, reason, len(calls)) == (None, "tool_calls", 1)
        require_valid(calls)
        assert {name for name, _ in calls} <= names
    content, reason, calls = ask(url, asks("required", seed=seed))
    assert reason in ("tool_calls", "length")
    assert content is None or reason == "length"  # the beginning of a truncated call
    require_valid(calls if reason == "tool_calls" else calls[:-1])
    assert calls


def test_text_is_free_without_a_forced_call(url: str) -> None:
    content, _, calls = whole(url, asks("auto", max_tokens=20))
    assert content
    assert calls == []
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    one = asks("auto", response_format=format, parallel_tool_calls=False)
    content, reason, calls = whole(url, one)
    assert reason == ("stop" if content else "tool_calls")
    jsonschema.validate(json.loads(content), schema) if content else require_valid(calls)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_anthropic_calls_are_forced(url: str, stream: bool) -> None:
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
    ):
        body = CHAT | {"tools": tools, "tool_choice": choice, "stream": stream}
        body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        reply = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        if stream:
            lines = [each[6:] for each in reply.text.splitlines() if each.startswith("data: ")]
            told = [json.loads(line) for line in lines]
            blocks = [e["content_block"] for e in told if e["type"] == "content_block_start"]
            (block,) = blocks
            parts = [e["delta"] for e in told if e["type"] == "content_block_delta"]
            report = json.loads("".join(each["partial_json"] for each in parts))
            (reason,) = [e["delta"]["stop_reason"] for e in told if e["type"] == "message_delta"]
        else:
            (block,) = reply.json()["content"]
            report, reason = block["input"], reply.json()["stop_reason"]
        assert (block["type"], reason) == ("tool_use", "tool_use")
        assert choice.get("name") in (None, block["name"])
        jsonschema.validate(report, SCHEMAS[block["name"]])


@pytest.mark.parametrize(
    ("change", "param", "reason"),
    [
        ({"tools": None}, "tool_choice", "requires tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "as an object"),
        ({"tool_choice": "perhaps"}, "tool_choice", "perhaps"),
        ({"regex": "a+"}, "tool_choice", "regex grammar as well"),
        ({"tools": [function("f", UNKNOWN, strict=True)]}, "tools", "uniqueItems"),
        ({"tools": [function("f", {"type": "array"})]}, "tools", "those of an object"),
    ],
)
def test_unforceable_call_is_rejected(
    url: str, change: dict[str, Any], param: str, reason: str
) -> None:
    error = post(f"{url}/v1/chat/completions", asks("required") | change, 400)["error"]
    assert error["param"] == param
    assert reason in error["message"]


def test_schema_must_be_enforceable_only_for_strict_tools(url: str) -> None:
    body = asks("required", max_tokens=5) | {"tools": [function("f", UNKNOWN)]}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200
    assert reply.headers["x-grammar"] == "lenient"


def test_body_that_forces_calls_is_read_apart() -> None:
    assert may_ask_for_grammar(json.dumps(asks("required")).encode())
    assert may_ask_for_grammar(json.dumps({"tools": [{"strict": True}]}).encode())
