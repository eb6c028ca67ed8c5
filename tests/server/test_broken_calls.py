"""Tool calls with broken JSON in every protocol: small mistakes are repaired, others become text
that no client executes.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.server.api.anthropic.anthropic_stream import events_of
from tests.server.scripted import TEMPLATE, TOOLS, Script, ScriptedClient, with_template
from tests.server.streams import events, post

MENDED = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "a\nb", "days": None,}}\n</tool_call>'
)
BROKEN = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": \'Bonn\'}}\n</tool_call>'
UNFINISHED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bo'
MEANT = {"city": "a\nb", "days": None}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 100,
    "messages": CHAT["messages"],
    "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
}
RESPONSES: dict[str, Any] = {
    "input": "x",
    "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedClient:
    return ScriptedClient(
        tokenizer_folder=with_template(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)
    )


@pytest.fixture(scope="module")
def url(engine: ScriptedClient) -> Iterator[str]:
    config = ServerConfig(port=0, in_process=True, served_model_name="m")
    with running_server(engine, config) as url:
        yield url


def streamed_chat(url: str) -> tuple[str, list[str], str]:
    """Return text, arguments of calls by index, and finish reason."""
    content, arguments, reason = "", dict[int, str](), ""
    for chunk in events(f"{url}/v1/chat/completions", CHAT):
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            said = call["function"]["arguments"]
            arguments[call["index"]] = arguments.get(call["index"], "") + said
        reason = choice["finish_reason"] or reason
    return content, list(arguments.values()), reason


@pytest.mark.parametrize("portion", [1, 1000])
def test_mended_call_is_a_call(url: str, engine: ScriptedClient, portion: int) -> None:
    engine.script = Script(MENDED, portion=portion)
    choice = post(f"{url}/v1/chat/completions", CHAT)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == MEANT
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    content, (arguments,), reason = streamed_chat(url)
    assert (content, json.loads(arguments), reason) == ("", MEANT, "tool_calls")
    message = post(f"{url}/v1/messages", MESSAGES)
    assert [block["input"] for block in message["content"]] == [MEANT]
    assert message["stop_reason"] == "tool_use"
    (item,) = post(f"{url}/v1/responses", RESPONSES)["output"]
    assert json.loads(item["arguments"]) == MEANT


@pytest.mark.parametrize("text", [BROKEN, UNFINISHED])
def test_broken_call_is_text(url: str, engine: ScriptedClient, text: str) -> None:
    engine.script = Script(text)
    choice = post(f"{url}/v1/chat/completions", CHAT)["choices"][0]
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    message = post(f"{url}/v1/messages", MESSAGES)
    assert message["content"] == [{"type": "text", "text": text}]
    assert message["stop_reason"] == "end_turn"
    (item,) = post(f"{url}/v1/responses", RESPONSES)["output"]
    assert item["content"][0]["text"] == text


@pytest.mark.parametrize("text", [BROKEN, UNFINISHED])
@pytest.mark.parametrize("portion", [1, 1000])
def test_stream_never_says_that_a_broken_call_is_finished(
    url: str, engine: ScriptedClient, text: str, portion: int
) -> None:
    engine.script = Script(text, portion=portion)
    content, arguments, reason = streamed_chat(url)
    assert (content, reason) == (text, "stop")
    for each in arguments:
        with pytest.raises(json.JSONDecodeError):
            json.loads(each)
    *said, last, _ = events_of(
        httpx.post(f"{url}/v1/messages", json=MESSAGES | {"stream": True}).content
    )
    assert last["delta"]["stop_reason"] == "end_turn"
    deltas = [event["delta"] for event in said if event["type"] == "content_block_delta"]
    assert "".join(each.get("text", "") for each in deltas) == text
    begun = [event["index"] for event in said if event["type"] == "content_block_start"]
    assert begun == [event["index"] for event in said if event["type"] == "content_block_stop"]
    told = events_of(httpx.post(f"{url}/v1/responses", json=RESPONSES | {"stream": True}).content)
    done = [each["item"] for each in told if each["type"] == "response.output_item.done"]
    assert {each["status"] for each in done if each["type"] == "function_call"} <= {"incomplete"}
    whole = "".join(each["delta"] for each in told if each["type"] == "response.output_text.delta")
    assert whole == text


def test_whole_call_next_to_a_broken_one_is_a_call(url: str, engine: ScriptedClient) -> None:
    whole = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    for first, second in ((BROKEN, whole), (whole, f"\n{BROKEN.removeprefix('Well.')}")):
        engine.script = Script(first + second, portion=3)
        choice = post(f"{url}/v1/chat/completions", CHAT)["choices"][0]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
        assert (
            choice["message"]["content"].strip()
            == BROKEN.removeprefix("" if first == BROKEN else "Well.").strip()
        )
        assert streamed_chat(url)[2] == "tool_calls"


def test_call_that_is_cut_off_stays_one(url: str, engine: ScriptedClient) -> None:
    """Cut a call off: OpenAI's clients get its beginning and the finish reason."""
    engine.script = Script(UNFINISHED, ends=False)
    choice = post(f"{url}/v1/chat/completions", CHAT | {"max_tokens": 17})["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1
