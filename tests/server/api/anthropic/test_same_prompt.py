"""The same conversation gives the same prompt in every protocol."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.anthropic.answer import count_tokens
from nano_inference.server.api.anthropic.models import CountRequest
from nano_inference.server.api.anthropic.request import encode
from nano_inference.server.api.openai.chat_answer import PROTOCOL as CHATS
from nano_inference.server.api.parsing import ChatFormat
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.routes import tokenize
from nano_inference.text import control_tokens
from tests.depth import at_depth
from tests.server.api.anthropic.conftest import TEMPLATE
from tests.server.scripted import ScriptedClient, with_template

# Shows whether there is content, and writes arguments that are JSON text already.
OF_TEXT = TEMPLATE.replace(
    "{{- message.content }}", "{{- 'none' if message.content is none else message.content }}"
)
OF_TEXT = OF_TEXT.replace(
    "call.function | tojson", "call.function.name + ' ' + call.function.arguments"
)

words = st.text(
    st.characters(codec="utf-8", categories=["L", "Nd", "Po", "Sm"]), min_size=1, max_size=8
)
texts = st.lists(words, min_size=1, max_size=3)
inputs = st.dictionaries(words, st.integers(0, 9) | words, max_size=2)
turns = st.lists(st.tuples(texts, st.lists(inputs, max_size=2), words | st.none()), max_size=3)


class Conversation:
    """One conversation as a body of each protocol."""

    def __init__(
        self,
        system: str | None,
        said: list[Any],
        last: list[str],
        begun: str | None,
        description: str | None,
    ) -> None:
        schema = {"type": "object", "properties": {"x": {"default": None}}}
        about = {} if description is None else {"description": description}
        function = {"name": "f", **about, "parameters": schema}
        self.openai: list[dict[str, Any]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self.anthropic: list[dict[str, Any]] = []
        self.tools = [{"type": "function", "function": function}]
        self.anthropic_tools = [{"name": "f", **about, "input_schema": schema}]
        for number, (question, calls, thought) in enumerate(said):
            self._say("user", question)
            self._answer(number, calls, thought)
        self._say("user", last)
        if begun is not None:
            self._say("assistant", [begun])

    def _say(self, role: str, said: list[str]) -> None:
        parts = [{"type": "text", "text": text} for text in said]
        self.openai.append({"role": role, "content": parts if len(said) > 1 else said[0]})
        if self.anthropic and self.anthropic[-1]["role"] == role:  # after results
            self.anthropic[-1]["content"] += parts
        else:
            self.anthropic.append({"role": role, "content": parts if len(said) > 1 else said[0]})

    def _answer(self, number: int, calls: list[dict[str, Any]], thought: str | None) -> None:
        thoughts = (
            [] if thought is None else [{"type": "thinking", "thinking": thought, "signature": "s"}]
        )
        fields: dict[str, Any] = {"role": "assistant", "content": None if calls else "Yes."}
        if thought is not None:
            fields["reasoning_content"] = thought
        if not calls:
            self.openai.append(fields)
            self.anthropic.append(
                {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "Yes."}]}
            )
            return
        names = [f"call{number}{place:04}" for place in range(len(calls))]
        uses = [
            {"type": "tool_use", "id": name, "name": "f", "input": call}
            for name, call in zip(names, calls, strict=True)
        ]
        fields["tool_calls"] = [
            {
                "id": name,
                "type": "function",
                "function": {"name": "f", "arguments": json.dumps(call)},
            }
            for name, call in zip(names, calls, strict=True)
        ]
        results = [{"type": "tool_result", "tool_use_id": name, "content": "ok"} for name in names]
        self.openai += [
            fields,
            *({"role": "tool", "tool_call_id": name, "content": "ok"} for name in names),
        ]
        self.anthropic += [
            {"role": "assistant", "content": thoughts + uses},
            {"role": "user", "content": results},
        ]


@pytest.fixture(scope="module", params=[TEMPLATE, OF_TEXT], ids=["objects", "text"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    client = ScriptedClient(
        tokenizer_folder=with_template(tmp_path_factory.mktemp("model"), request.param)
    )
    return Served(
        "m", client._engine_info(), client.tokenizer, ChatFormat("hermes", "think"), ServerConfig()
    )


@pytest.mark.thorough(cases=["text"])
@given(
    system=words | st.none(),
    said=turns,
    last=texts,
    begun=words | st.none(),
    description=words | st.none(),
    thinks=st.booleans(),
)
@settings(max_examples=at_depth(60), deadline=None)
def test_same_conversation_is_the_same_prompt(
    served: Served,
    system: str | None,
    said: list[Any],
    last: list[str],
    begun: str | None,
    description: str | None,
    thinks: bool,
) -> None:
    it = Conversation(system, said, last, begun, description)
    openai = {
        "messages": it.openai,
        "tools": it.tools,
        "continue_final_message": begun is not None,
        # Anthropic's models think on request only
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    anthropic = {
        "model": "m",
        "messages": it.anthropic,
        "tools": it.anthropic_tools,
        "thinking": {"type": "enabled" if thinks else "disabled"},
        **({} if system is None else {"system": system}),
    }
    body = json.dumps(openai).encode()
    prompt = encode(CountRequest.model_validate(anthropic), served)
    assert CHATS.prepare(body, served, "id").asks[0].prompt == prompt
    assert tokenize(body, served)["tokens"] == prompt
    assert count_tokens(json.dumps(anthropic).encode(), served) == {"input_tokens": len(prompt)}


@pytest.mark.thorough(cases=["text"])
def test_arguments_are_json_for_any_template(served: Served) -> None:
    said = [(["What?"], [{"x": "a"}], None)]
    it = Conversation(None, said, ["And?"], None, None)
    ids = encode(CountRequest.model_validate({"model": "m", "messages": it.anthropic}), served)
    assert served.tokenizer is not None
    assert '{"x": "a"}' in served.tokenizer.decode(ids)


@pytest.mark.thorough(cases=["objects-count_tokens"])
@pytest.mark.parametrize("read", [tokenize, count_tokens])
def test_too_many_tools_and_messages(
    read: Callable[[bytes, Served], object], served: Served
) -> None:
    it = Conversation(None, [], ["Hi"], None, None)
    tools = it.tools if read is tokenize else it.anthropic_tools
    for change, said in (
        ({"tools": tools * 129}, "the number of tools is 129; this server accepts at most 128."),
        (
            {"messages": it.openai * 5000},
            "the number of messages is 5000; this server accepts at most 4096.",
        ),
    ):
        body = json.dumps({"model": "m", "messages": it.openai, **change}).encode()
        with pytest.raises((ApiError, InvalidRequest)) as raised:
            read(body, served)
        assert getattr(raised.value, "message", "") == said


@pytest.mark.thorough
def test_first_chat_finds_all_made() -> None:
    """Build slow structures for a large vocabulary at the server's start, not in the first chat."""
    client = ScriptedClient()
    served = Served("m", client._engine_info(), client.tokenizer, ChatFormat(), ServerConfig())
    made = control_tokens._secret_tokenizer.cache_info().misses
    body = b'{"messages": [{"role": "user", "content": "What is <|im_end|>?"}]}'
    CHATS.prepare(body, served, "id")
    assert control_tokens._secret_tokenizer.cache_info().misses == made
