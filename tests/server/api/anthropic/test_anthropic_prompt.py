"""Conversion of Anthropic's messages to a conversation for chat templates."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.server.api.anthropic.models import CountRequest
from nano_inference.server.api.anthropic.request import Conversation, conversation
from nano_inference.server.errors import ApiError


def converse(*messages: tuple[str, Any], **fields: Any) -> Conversation:
    turns = [{"role": role, "content": content} for role, content in messages]
    return conversation(CountRequest.model_validate({"model": "m", "messages": turns} | fields))


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def test_prompt_takes_all_kinds_of_blocks():
    call = {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": ["UTC", 1]}}
    given = converse(
        ("user", [text("a"), text("b")]),
        ("user", "c"),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "zzz"},
                text("let me see"),
                call,
            ],
        ),
        (
            "user",
            [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("12"), text("00")]},
                text("and now?"),
            ],
        ),
        system=[text("x-anthropic-billing-header: cch=123;"), text("be"), text("brief")],
        tools=[
            {
                "name": "now",
                "input_schema": {"type": "object"},
                "cache_control": {"type": "ephemeral"},
            }
        ],
    )
    function = {"name": "now", "arguments": {"zone": ["UTC", 1]}}
    assert given.messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "now", "content": "12\n00"},
        {"role": "user", "content": "and now?"},
    ]
    described = {"name": "now", "parameters": {"type": "object"}}
    assert given.tools == [{"type": "function", "function": described}]
    assert not given.prefilled


ROLES = st.sampled_from(["user", "assistant"])
WORDS = st.text(alphabet="ab\n", max_size=3).map(lambda each: each + "x")


@pytest.mark.thorough
@given(
    st.lists(st.tuples(ROLES, st.lists(WORDS, min_size=1, max_size=4)), min_size=1, max_size=6),
    st.data(),
)
def test_turns_of_one_role_are_one_turn(turns: list[tuple[str, list[str]]], data: st.DataObject):
    whole = [(role, [text(each) for each in texts]) for role, texts in turns]
    apart = []
    for role, texts in turns:  # the same in several messages, some plain strings
        for each in texts:
            block = text(each)
            if (
                apart
                and apart[-1][0] == role
                and isinstance(apart[-1][1], list)
                and data.draw(st.booleans())
            ):
                apart[-1][1].append(block)
            else:
                apart.append((role, data.draw(st.sampled_from([[block], each]))))
    one = converse(*whole)
    assert one == converse(*apart)
    roles = [message["role"] for message in one.messages]
    assert all(role != other for role, other in itertools.pairwise(roles))
    assert one.prefilled == (roles[-1] == "assistant")


def test_empty_beginning_is_no_beginning():
    assert not converse(("user", "a"), ("assistant", "")).prefilled
    assert not converse(("user", "a"), ("assistant", [])).prefilled


def test_thinking_is_off_unless_asked_for():
    assert converse(("user", "a")).template_kwargs == {"enable_thinking": False}
    for kind, asked in (
        ("enabled", True),
        ("adaptive", True),
        ("between_tools", True),
        ("disabled", False),
    ):
        thinking = {"type": kind, "budget_tokens": 1024}
        assert converse(("user", "a"), thinking=thinking).template_kwargs == {
            "enable_thinking": asked
        }
    asked = converse(("user", "a"), chat_template_kwargs={"enable_thinking": True, "more": 1})
    assert asked.template_kwargs == {"enable_thinking": True, "more": 1}


def test_prompt_has_no_tools_if_calls_are_disabled():
    tools = [{"name": "now", "input_schema": {}}]
    assert converse(("user", "a"), tools=tools, tool_choice={"type": "none"}).tools is None
    assert converse(("user", "a"), tools=tools, tool_choice={"type": "auto"}).tools


def test_prompt_drops_only_the_billing_line():
    given = converse(("user", "a"), system="x-anthropic-billing-header: cch=1;\nbe brief")
    assert given.messages[0] == {"role": "system", "content": "be brief"}
    assert (
        converse(("user", "x-anthropic-billing-header: 1")).messages[0]["content"]
        == "x-anthropic-billing-header: 1"
    )


@pytest.mark.parametrize(
    "turns",
    [
        [("user", [{"type": "tool_use", "id": "a", "name": "b", "input": {}}])],
        [("user", [{"type": "thinking", "thinking": "a", "signature": "b"}])],
        [("assistant", [{"type": "tool_result", "tool_use_id": "a"}]), ("user", "a")],
        [("assistant", [{"type": "tool_use", "id": "a", "name": "b", "input": {}}])],
        [("user", "a"), ("assistant", [{"type": "thinking", "thinking": "a", "signature": "b"}])],
        [("user", "a"), ("assistant", "b\n")],
        [("user", [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}])],
        [("system", [{"type": "image"}]), ("user", "a")],
    ],
)
def test_empty_conversation_is_rejected(turns: list[tuple[str, Any]]):
    with pytest.raises(ApiError) as caught:
        converse(*turns)
    assert caught.value.status == 400


def test_documents_of_text_are_what_the_user_says() -> None:
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    blocks = [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "a"},
            "title": "T",
        },
        {"type": "document", "source": {"type": "content", "content": parts}, "context": "C"},
        {"type": "text", "text": "Which?"},
    ]
    request = CountRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": blocks}]}
    )
    assert conversation(request).messages == [{"role": "user", "content": "T\na\nC\nc\nd\nWhich?"}]
