"""Conversations with tools in OpenAI's format, in the templates of three families."""

import json
from typing import Any

import pytest

from nano_inference.errors import InvalidRequest
from nano_inference.text.chat import render_chat
from tests.text.chat_templates import HERMES, LLAMA, QWEN

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "hermes": HERMES}
ARGUMENTS = {"city": "Paris <é>", "days": [1, 2]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array", "items": {"type": ["integer", "null"]}},
            },
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "assistant", "content": "It rains.", "tool_calls": None},
    {"role": "user", "content": "And then?"},
]
JSON_ARGUMENTS = json.dumps(ARGUMENTS, ensure_ascii=False)


def render(name: str, messages: list[dict[str, Any]] = CONVERSATION, **options: Any) -> str:
    kwargs = {"date_string": "today"} | options.pop("template_kwargs", {})
    options = {"tools": [TOOL]} | options
    return render_chat(
        TEMPLATES[name], messages, special_tokens=TOKENS, template_kwargs=kwargs, **options
    )


def test_qwen() -> None:
    text = render("qwen")
    assert text.startswith("<|im_start|>system\nBe brief.\n\nTools")
    assert f"\n<tools>\n{json.dumps(TOOL)}\n</tools>\n" in text
    assert text.endswith(
        "<|im_start|>user\nWeather?<|im_end|>\n"
        f'<|im_start|>assistant\n<tool_call>\n{{"name": "get_weather", "arguments": '
        f"{JSON_ARGUMENTS}}}\n</tool_call>"
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt rains.<|im_end|>\n<|im_start|>user\nAnd "
        "then?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama() -> None:
    text = render("llama")
    assert text.startswith(
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday: today\n\nBe brief.<|eot_id|>"
    )
    assert json.dumps(TOOL, indent=4) + "\n\nWeather?<|eot_id|>" in text
    assert f'\n\n{{"name": "get_weather", "parameters": {JSON_ARGUMENTS}}}<|eot_id|>' in text
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n"rain"<|eot_id|>' in text
    two = render("llama", [CONVERSATION[1], {"role": "assistant", "tool_calls": [CALL, CALL]}])
    # one message each: the template renders one result a message
    assert two.count('{"name": "get_weather", "parameters": {"city"') == 2


def test_template_of_parts() -> None:
    text = render("hermes")
    assert text.startswith(
        "<s><|im_start|>system\ndef get_weather(city: string, days: list[integer or null]):"
        "  # The weather.\n<|im_end|>\n"
    )
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n" in text
    assert '<tool_call>\nget_weather city="Paris <é>" days=[1, 2]\n</tool_call><|im_end|>' in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_renders_without_tools(name: str) -> None:
    plain = render(name, CONVERSATION[:2], tools=None)
    assert "get_weather" not in plain
    assert "Weather?" in plain
    assert render(name, CONVERSATION[:2], tools=[]) == plain
    assert (
        render(name, CONVERSATION[:2], tools=None, add_generation_prompt=False)
        == plain[: plain.rindex("<|", 0, -20)]
    )


def test_arguments_that_are_no_object_stay_text() -> None:
    for arguments in ("{oops", "[1]", "[" * 100_000):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        assert f'"arguments": {arguments}}}' in render(
            "qwen", [CONVERSATION[1], {"role": "assistant", "tool_calls": [call]}]
        )
    empty = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert '"parameters": {}}' in render(
        "llama", [CONVERSATION[1], {"role": "assistant", "tool_calls": [empty]}]
    )


def test_unsupported_messages_are_rewritten_for_a_template() -> None:
    def last(template: str) -> str:
        return render_chat(
            template, CONVERSATION, special_tokens=TOKENS, add_generation_prompt=False
        )

    loop = "{% for m in messages %}|{{ m.role }} "
    calls = (
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% "
        "endfor %}{% endfor %}"
    )
    # the template requires a string of JSON text
    assert "|assistant get_weather{" in last(loop + "{{ m.content + '' }}" + calls)
    assert "|assistant none get_weather{" in last(
        loop + "{{ 'none ' if m.content is none else m.content }}" + calls
    )
    assert "|tool get_weather rain|" in last(
        loop + "{{ m.name ~ ' ' if m.name }}{{ m.content }}{% endfor %}"
    )
    assert last("{{ messages[-1].content ~ messages[2].refusal is defined }}") == "And then?False"
    developer = [{"role": "developer", "content": "x"}]
    assert render_chat("{{ messages[0].role }}", developer, special_tokens={}) == "system"
    assert (
        render_chat("{{ messages[0].role }}{# developer #}", developer, special_tokens={})
        == "developer"
    )
    thought = [{"role": "assistant", "content": "x", "reasoning": "y"}]
    assert render_chat("{{ messages[0].reasoning_content }}", thought, special_tokens={}) == "y"


def test_parts_reach_a_template_that_knows_them() -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    template = (
        "{% set c = messages[0].content %}{% if c is string %}{{ c }}{% else %}{{ "
        "c[0].text }}{% endif %}"
    )
    assert render_chat(template, parts, special_tokens={}) == "ab"
    assert render_chat(template + "{{ c is string }}", parts, special_tokens={}) == "abTrue"
    image = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    assert render_chat("{{ messages[0].content[1].type }}", image, special_tokens={}) == "image"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["The answer", " is 4 \n", "x"])
def test_last_message_is_continued(name: str, content: str) -> None:
    messages = [CONVERSATION[1], {"role": "assistant", "content": content}]
    text = render(name, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith(content.strip() if name == "llama" else content)
    assert render(name, messages, add_generation_prompt=False).startswith(text)
    with pytest.raises(InvalidRequest, match="unset one"):
        render(name, messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match=r"text in its content|omits the last message"):
        render(name, CONVERSATION[:3], add_generation_prompt=False, continue_final_message=True)


def test_unrendered_message_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="omits the last message"):
        render_chat(
            "x",
            CONVERSATION,
            special_tokens={},
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_template_kwargs() -> None:
    assert render("qwen", template_kwargs={"enable_thinking": False}).endswith(
        "<think>\n\n</think>\n\n"
    )
    for name in (
        *(
            "messages",
            "tools",
            "documents",
            "add_generation_prompt",
            "tokenize",
            "chat_template",
            "bos_token",
            "x_token",
        ),
        *(
            "range",
            "namespace",
            "raise_exception",
            "strftime_now",
            "self",
            "loop",
            "__class__",
            "_x",
            "a b",
            "",
            "a.b",
        ),
    ):
        with pytest.raises(InvalidRequest, match="cannot be set by a request"):
            render("qwen", template_kwargs={name: "x"})
    with pytest.raises(InvalidRequest, match="contains a value of type function"):
        render("qwen", template_kwargs={"f": lambda: 1})


@pytest.mark.thorough
def test_data_that_cannot_be_rendered() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for bad, words in (
        ("\ud800", "surrogate"),
        (deep, "nested too deeply"),
        ({"\udfff": 1}, "surrogate"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            render("qwen", [{"role": "user", "content": bad}])
    with pytest.raises(InvalidRequest, match="a chat message is a str"):
        render("qwen", ["hello"])  # type: ignore[list-item]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [True, False])
def test_equal_to_transformers(name: str, thinking: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    text = "Weather?" if name != "hermes" else [{"type": "text", "text": "Weather?"}]
    messages = [
        {"role": "user", "content": text},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": TOOL["function"] | {"arguments": ARGUMENTS}}
            ],
        },
        {
            "role": "tool",
            "content": "rain" if name != "hermes" else [{"type": "text", "text": "rain"}],
            "name": "get_weather",
        },
        {
            "role": "assistant",
            "content": "<think>\nRain.\n</think>\n\nIt rains."
            if name != "hermes"
            else [{"type": "text", "text": "It"}],
        },
    ]
    kwargs = {"enable_thinking": thinking, "date_string": "today"}
    for tools in ([TOOL], None):
        for prompt in (True, False):
            for go_on in (False,) if prompt else (True, False):
                options = {
                    "tools": tools,
                    "add_generation_prompt": prompt,
                    "continue_final_message": go_on,
                }
                [expected], _ = utils.render_jinja_template(
                    [messages], chat_template=TEMPLATES[name], **options, **kwargs, **TOKENS
                )
                assert (
                    render_chat(
                        TEMPLATES[name],
                        messages,
                        special_tokens=TOKENS,
                        template_kwargs=kwargs,
                        **options,
                    )
                    == expected
                )
