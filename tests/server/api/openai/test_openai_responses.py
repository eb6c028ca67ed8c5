"""`/v1/responses` through OpenAI's own client, with strict validation, on a scripted engine."""

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from nano_inference.server.api.openai.kept_responses import KeptResponse, KeptResponses
from nano_inference.server.api.openai.responses_answer import ItemStream
from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.choices import ChoiceDelta
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.main import running_server
from tests.server.scripted import THINKS_AND_CALLS, Script, ScriptedClient

LOGPROBS: Any = ["message.output_text.logprobs"]
TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    }
]


def prompt(script: ScriptedClient) -> str:
    """Return the text of the last prompt that the engine received."""
    return script.tokenizer.decode(script.requests[-1].prompt, skip_special_tokens=False)


def test_response(client: OpenAI, script: ScriptedClient) -> None:
    reply = client.responses.create(
        model="scripted",
        input="Hello",
        instructions="Be short.",
        include=LOGPROBS,
        top_logprobs=2,
        metadata={"run": "7"},
    )
    assert (reply.output_text, reply.status, reply.metadata) == (
        "Hello there, 🙂!",
        "completed",
        {"run": "7"},
    )
    assert prompt(script).startswith(
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello"
    )
    (message,) = reply.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert b"".join(bytes(each.bytes) for each in part.logprobs[:-1]).decode() == reply.output_text
    assert {len(each.top_logprobs) for each in part.logprobs} == {2}
    assert reply.usage is not None
    assert reply.usage.output_tokens == len(part.logprobs)
    assert reply.usage.input_tokens_details.cached_tokens == 3


def test_stream_ends_with_the_whole_answer(client: OpenAI, script: ScriptedClient) -> None:
    script.script = Script(THINKS_AND_CALLS)
    whole = client.responses.create(model="scripted", input="Köln?", tools=TOOLS)
    events = list(
        client.responses.create(model="scripted", input="Köln?", tools=TOOLS, stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    thought, call = events[-1].response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "What is asked? The weather."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Köln", "days": 2})

    def told(output: list[Any]) -> list[dict[str, Any]]:
        return [item.model_dump(exclude={"id", "call_id"}) for item in output]

    assert told(whole.output) == told(events[-1].response.output)
    parts = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert "".join(parts) == call.arguments
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert told(done) == told(events[-1].response.output)


@pytest.mark.parametrize("include", [[], LOGPROBS])
def test_stream_of_text_holds_all_that_the_client_wants(client: OpenAI, include: list[Any]) -> None:
    events = list(
        client.responses.create(model="scripted", input="Hello", include=include, stream=True)
    )
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    told = [
        each
        for event in events
        if event.type == "response.output_text.delta"
        for each in event.logprobs
    ]
    assert done.text == "Hello there, 🙂!"
    assert [each.token for each in done.logprobs] == [each.token for each in told]
    assert bool(told) == bool(include)


def test_conversation_continues_from_a_stored_response(
    client: OpenAI, script: ScriptedClient
) -> None:
    script.script = Script(THINKS_AND_CALLS)
    first = client.responses.create(
        model="scripted", input="Köln?", tools=TOOLS, instructions="Only now."
    )
    call = first.output[-1]
    assert call.type == "function_call"
    script.script = Script("Sunny.")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(
        model="scripted", previous_response_id=first.id, input=[output]
    )
    assert second.previous_response_id == first.id
    asked = prompt(script)
    assert "Only now." not in asked
    assert asked.index("Köln?") < asked.index('"city": "Köln"') < asked.index("tool\nsunny")
    third = client.responses.create(
        model="scripted", previous_response_id=second.id, input="Thanks"
    )
    assert prompt(script).startswith(asked.removesuffix("<|im_start|>assistant\n"))
    assert "Sunny.<|im_end|>\n<|im_start|>user\nThanks" in prompt(script)
    assert client.responses.retrieve(third.id) == third
    assert client.responses.input_items.list(second.id).data[0].type == "function_call_output"
    (said,) = client.responses.input_items.list(third.id).data
    assert said.type == "message"
    assert said.content[0].text == "Thanks"  # pyright: ignore
    client.responses.delete(third.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)


@pytest.mark.parametrize("most", [16, 19, 22, 25, 29])
def test_conversation_continues_after_a_truncated_call(
    client: OpenAI, script: ScriptedClient, most: int
) -> None:
    script.script = Script(
        '<tool_call>\n{"name": "weather", "arguments": {"city": "K\\u00f6ln", "days": 2}}\n'
        "</tool_call>"
    )
    first = client.responses.create(
        model="scripted", input="Köln?", tools=TOOLS, max_output_tokens=most
    )
    script.script = Script("Sunny.")
    client.responses.create(model="scripted", previous_response_id=first.id, input="And?")
    assert "Köln?" in prompt(script)


def test_unstored_response_is_not_found(client: OpenAI) -> None:
    reply = client.responses.create(model="scripted", input="Hello", store=False)
    assert not (reply.model_extra or {})["store"]
    with pytest.raises(openai.BadRequestError, match="send the whole conversation") as problem:
        client.responses.create(model="scripted", input="More", previous_response_id=reply.id)
    assert problem.value.param == "previous_response_id"


def test_response_that_is_cut_off_says_so(client: OpenAI) -> None:
    reply = client.responses.create(model="scripted", input="Hello", max_output_tokens=2)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[0].status == "incomplete"  # pyright: ignore


@pytest.mark.parametrize("max_tokens", range(2, 60, 3))
def test_stream_says_of_an_item_what_the_response_says(
    max_tokens: int, client: OpenAI, script: ScriptedClient
) -> None:
    """Cut the response in reasoning, in a call's arguments or in the text after them."""
    script.script = Script(THINKS_AND_CALLS + "Done.", ends=False)
    events = list(
        client.responses.create(
            model="scripted",
            input="Hello",
            max_output_tokens=max_tokens,
            stream=True,
            tools=TOOLS,
        )
    )
    done = [each.item.status for each in events if each.type == "response.output_item.done"]  # pyright: ignore
    last = events[-1]
    assert last.type == "response.incomplete"
    assert done == [each.status for each in last.response.output]  # pyright: ignore
    assert done[-1] == "incomplete"
    assert set(done[:-1]) <= {"completed"}


def test_schema_becomes_a_grammar(client: OpenAI, script: ScriptedClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    client.responses.create(model="scripted", input="Hello", text=text)
    grammar = script.requests[-1].params.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema


def test_engine_failure_ends_the_stream_with_a_failed_response(
    client: OpenAI, script: ScriptedClient
) -> None:
    script.script = Script("Hello there.", fail_after=2)
    events = list(client.responses.create(model="scripted", input="Hello", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": []}, "input", "at least one item"),
        ({"input": [3]}, "input.0", "must be an object"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "item_reference"),
        ({"input": [{"role": "user"}]}, "input.0.content", "must be a string or a list"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "reads only text",
        ),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input.0.arguments", "a string"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0", "web_search"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "requires tools"),
        ({"input": "a", "background": True, "store": False}, "background", "omit store"),
        ({"input": "a", "truncation": "middle"}, "truncation", "auto"),
        ({"input": "a", "include": ["everything"]}, "include", "everything"),
        ({"input": "a", "messages": [{}]}, "messages", "use input"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "greater than or equal"),
        ({"input": "a b" * 3000}, "input", "context"),
    ],
)
def test_rejection_names_its_field(
    client: OpenAI, script: ScriptedClient, body: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as problem:
        client.post("/responses", body=body, cast_to=object)
    assert problem.value.param == param
    assert "messages" not in problem.value.message or param == "messages"
    assert not script.requests


def test_responses_unused_longest_are_dropped_first() -> None:
    kept = KeptResponses(700)
    for name in "abc":
        kept.put(KeptResponse({"id": name, "text": "x" * 300}, [], []))
        if name != "a":
            kept.get("a")
    with pytest.raises(ApiError):
        kept.get("b")
    assert kept.get("a").response["id"] == "a"
    kept.put(KeptResponse({"id": "d", "text": "x" * 2000}, [], []))
    for name in "abcd":
        with pytest.raises(ApiError):
            kept.get(name)
    assert kept._bytes == 0


def test_messages_of_responses_that_were_dropped_still_count() -> None:
    kept = KeptResponses(2000)
    messages = [{"role": "user", "content": "x" * 900}]
    kept.put(KeptResponse({"id": "a"}, [], messages))
    kept.put(KeptResponse({"id": "b"}, [], [*messages, {"role": "user", "content": "y"}]))
    assert 900 < kept._bytes < 1300
    kept.remove("a")
    assert kept._bytes > 900
    kept.put(KeptResponse({"id": "c"}, [], [{"role": "user", "content": "z" * 900}]))
    kept.put(KeptResponse({"id": "d"}, [], [{"role": "user", "content": "z" * 900}]))
    for name in "ab":
        with pytest.raises(ApiError):
            kept.get(name)
    for name in "cd":
        kept.remove(name)
    assert kept._bytes == 0


def test_store_can_be_disabled(script: ScriptedClient) -> None:
    with (
        running_server(
            ScriptedClient(tokenizer_folder=script.folder),
            ServerConfig(port=0, max_stored_responses=0),
        ) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        reply = client.responses.create(model="scripted", input="Hello")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(reply.id)


def pieces() -> st.SearchStrategy[list[ChoiceDelta]]:
    """Draw an answer's pieces: reasoning, text, and calls that begin one after another."""
    texts = st.sampled_from(["", " ", "\n", "a", "b c"])
    kinds = st.lists(st.tuples(st.sampled_from(["think", "say", "call", "more"]), texts))

    def build(drawn: list[tuple[str, str]]) -> list[ChoiceDelta]:
        made, calls = list[ChoiceDelta](), 0
        for kind, text in drawn:
            if kind == "think":
                made.append(ChoiceDelta(0, reasoning=text))
            elif kind == "say":
                made.append(ChoiceDelta(0, content=text))
            elif kind == "call":
                call = ToolCallDelta(calls, f"call_{calls}", "f", text)
                made.append(ChoiceDelta(0, tool_calls=(call,)))
                calls += 1
            elif calls:
                call = ToolCallDelta(calls - 1, None, None, text)
                made.append(ChoiceDelta(0, tool_calls=(call,)))
        return made

    return kinds.map(build)


@given(pieces())
def test_items_open_and_close_one_after_the_other(drawn: list[ChoiceDelta]) -> None:
    stream = ItemStream({}, None, None, one_call=False)
    events = [event for piece in drawn for event in stream.push(piece)]
    events += stream.end()
    open_item: str | None = None
    texts: dict[str, str] = {}
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert open_item is None
                open_item = event["item"]["id"]
                texts[open_item] = ""
            case "response.output_item.done":
                assert event["item"]["id"] == open_item
                said = event["item"].get("arguments") or "".join(
                    part["text"] for part in event["item"].get("content", ())
                )
                assert said == texts[event["item"]["id"]]
                open_item = None
            case _:
                assert event["item_id"] == open_item
                texts[open_item] += event.get("delta", "")
    assert open_item is None
    arguments = "".join(call.arguments for piece in drawn for call in piece.tool_calls)
    told = "".join(texts[each["id"]] for each in stream.items if each["type"] == "function_call")
    assert told == arguments
    said = "".join(piece.content for piece in drawn)
    told = "".join(texts[each["id"]] for each in stream.items if each["type"] == "message")
    assert told.split() == said.split() or told.replace(" ", "") == said.replace(" ", "").strip()
