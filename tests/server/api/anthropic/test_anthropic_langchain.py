"""langchain-anthropic against `/v1/messages`."""

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from tests.server.api.anthropic.conftest import Scripted
from tests.server.scripted import Script


@pytest.fixture
def chat(scripted: Scripted) -> ChatAnthropic:
    fields: dict[str, Any] = {
        "model": "m",
        "max_tokens": 100,
        "base_url": scripted.url,
        "api_key": "k",
    }
    return ChatAnthropic(**fields, max_retries=0, stop=["END"])


@pytest.mark.thorough
def test_invoke_does_not_count_twice(chat: ChatAnthropic, scripted: Scripted):
    scripted.script = Script("Hello there. END", cached_tokens=4)
    answer = chat.invoke([("system", "Be short."), ("human", "Hi")])
    assert answer.text.strip() == "Hello there."
    assert answer.usage_metadata
    assert answer.usage_metadata["input_tokens"] == len(scripted.client.requests[-1].prompt)
    assert answer.usage_metadata.get("input_token_details", {}).get("cache_read") == 4
    assert answer.response_metadata["stop_reason"] == "stop_sequence"


def test_stream_does_not_count_twice(chat: ChatAnthropic, scripted: Scripted):
    scripted.script = Script(cached_tokens=4)
    chunks = list(chat.stream("Hi"))
    assert "".join(chunk.text for chunk in chunks) == "Hello there."
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata
    assert whole.usage_metadata["input_tokens"] == len(scripted.client.requests[-1].prompt)
    assert whole.usage_metadata["output_tokens"] == 4


def test_empty_answer(chat: ChatAnthropic, scripted: Scripted):
    scripted.script = Script("")
    assert chat.invoke("Hi").text == ""
    assert "".join(chunk.text for chunk in chat.stream("Hi")) == ""


def weather(city: str) -> str:
    """Weather of a city."""
    return f"sun in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_tools(chat: ChatAnthropic, scripted: Scripted, stream: bool):
    scripted.script = Script(
        'One moment. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    )
    model = chat.bind_tools([weather])
    if stream:
        first, *rest = list(model.stream("Weather in Rome?"))
        for chunk in rest:
            first += chunk  # pyright: ignore[reportAssignmentType]
        answer: Any = first
    else:
        answer = model.invoke("Weather in Rome?")
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    scripted.script = Script("Sunny.")
    history = [
        ("human", "Weather in Rome?"),
        answer,
        ToolMessage(weather("Rome"), tool_call_id=call["id"]),
    ]
    final = model.invoke(history)
    assert isinstance(final, AIMessage)
    assert final.text == "Sunny."
    assert "tool\nsun in Rome<|im_end|>" in scripted.prompt()


def test_thinking(scripted: Scripted):
    scripted.script = Script("<think>Hm.</think>Hello.")
    fields: dict[str, Any] = {
        "model": "m",
        "max_tokens": 2000,
        "base_url": scripted.url,
        "api_key": "k",
    }
    chat = ChatAnthropic(**fields, thinking={"type": "enabled", "budget_tokens": 1024})
    answer = chat.invoke("Hi")
    assert answer.text == "Hello."
    assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]
    assert chat.get_num_tokens_from_messages([answer, HumanMessage("And?")]) > 0
