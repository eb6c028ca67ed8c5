"""Calls and results in the history, in templates that render all, some or none: nothing is lost."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.text.call_shapes import CallShape, reshaped
from nano_inference.text.chat import render_chat
from tests.depth import at_depth
from tests.text.chat_templates import HERMES, LLAMA, QWEN

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "qwen": QWEN,
    "llama 3.1": LLAMA,
    "hermes": HERMES,
    "chatml": CHATML,
    "chatml with a system message": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('a system message comes first') "
        "}}{% endif %}" + CHATML
    ),
    "parts": (
        "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}{% "
        "endfor %}{% endfor %}"
    ),
    "llama 3": (
        "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] %}"
        "{% set content = content + '<|end_header_id|>\\n\\n' + message['content'] | trim + "
        "'<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content "
        "}}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role "
        "not supported') }}"
        "{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate "
        "user/assistant/user/assistant/...') }}{% endif %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' "
        "}}{% endfor %}"
    ),
    "llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content.strip() }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
    ),
    "lfm2": (
        "{{- bos_token -}}{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + "
        "'\\n' -}}"
        "{%- set content = message['content'] -%}{%- if content is not string -%}"
        "{%- set content = content | tojson -%}{%- endif -%}{%- if message['role'] == 'tool' -%}"
        "{%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' -%}{%- "
        "endif -%}"
        "{{- content + '<|im_end|>\\n' -}}{%- endfor -%}"
    ),
    "mistral": (
        "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}"
        "{{- '[INST] ' + message.content + '[/INST]' }}"
        "{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- "
        "'[TOOL_CALLS] [' }}"
        "{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] "
        "}}"
        "{%- if call.id | length != 9 %}{{- raise_exception('ids have length 9!') }}{%- endif %}"
        "{{- ', \"id\": \"' + call.id + '\"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- "
        "endfor %}"
        "{{- ']</s>' }}{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + "
        "'</s>' }}"
        "{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + message.content "
        "| string }}"
        "{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have length 9!') "
        "}}{%- endif %}"
        "{{- ', \"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
        "{%- else %}{{- raise_exception('no such role') }}{%- endif %}{%- endfor %}"
    ),
    "calls alone": (  # the template omits unknown roles
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role }}: {{ "
        "m.content or '' }}"
        "{% for call in m.tool_calls or [] %}CALL {{ call.function | tojson }}{% endfor %}\n{% "
        "endif %}{% endfor %}"
    ),
    "a word like nothing": "Answer null where None is right. {{ tools | tojson if tools }}" + QWEN,
}
_MISSING = object()


def word(*parts: object) -> str:
    return "w" + "x".join(map(str, parts)) + "w"


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": word("question")}]
    for turn in range(draw(st.integers(1, 3))):
        prefix = draw(st.sampled_from(["call_", "", "chatcmpl-tool-0123456789abcdef"]))
        calls, answers = [], []
        for number in range(draw(st.integers(1, 3))):
            arguments: Any = {word("key", turn, number): word("value", turn, number)}
            arguments = draw(st.sampled_from([arguments, json.dumps(arguments)]))
            name = f"{prefix}{turn}{number}"
            function = {"name": word("name", turn, number), "arguments": arguments}
            calls.append({"id": name, "type": "function", "function": function})
            answers.append(
                {"role": "tool", "tool_call_id": name, "content": word("answer", turn, number)}
            )
        said = draw(
            st.sampled_from(
                [
                    None,
                    "",
                    _MISSING,
                    word("said", turn),
                    [{"type": "text", "text": word("said", turn)}],
                ]
            )
        )
        asking = {"role": "assistant", "content": said, "tool_calls": calls}
        if said is _MISSING:
            del asking["content"]
        messages += [asking, *draw(st.permutations(answers))]
        if draw(st.booleans()):
            messages += [{"role": "assistant", "content": word("summary", turn)}]
            messages += [{"role": "user", "content": word("next", turn)}]
        elif draw(st.booleans()):
            messages += [{"role": "user", "content": word("next", turn)}]
    return messages


def tools_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [
        call["function"]["name"] for message in messages for call in message.get("tool_calls", ())
    ]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return [
        {
            "type": "function",
            "function": {"name": name, "description": "A tool.", "parameters": parameters},
        }
        for name in names
    ]


@pytest.mark.thorough(cases=["hermes"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=at_depth(25))
@given(data=st.data())
def test_tool_calls_and_results_are_rendered(name: str, data: st.DataObject) -> None:
    messages = data.draw(histories())
    if "system" in name:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    before = json.dumps(
        [{key: repr(value) for key, value in message.items()} for message in messages]
    )
    tools = tools_of(messages) if data.draw(st.booleans()) else None
    text = render_chat(
        TEMPLATES[name],
        messages,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        tools=tools,
        add_generation_prompt=False,
        template_kwargs={"date_string": "today"},
    )
    nothing = render_chat(
        TEMPLATES[name],
        messages[: 2 if "system" in name else 1],
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        tools=tools,
        add_generation_prompt=False,
        template_kwargs={"date_string": "today"},
    )
    assert (
        json.dumps([{key: repr(value) for key, value in message.items()} for message in messages])
        == before
    )
    for message in messages:
        for call in message.get("tool_calls", ()):
            number = call["function"]["name"][len(word("name")) - 1 : -1]
            for what in ("name", "key", "value"):
                said = f"w{what}{number}w"
                assert text.count(said) == nothing.count(said) + 1, said
        if message["role"] in ("tool", "user"):
            assert text.count(message["content"]) == 1
    for odd in ("None", "null", "'wkey", '\\"wkey'):
        assert text.count(odd) == nothing.count(odd)


def test_tool_results_follow_their_calls_one_call_a_message() -> None:
    calls = [
        {"id": str(n), "type": "function", "function": {"name": f"f{n}", "arguments": "{}"}}
        for n in range(2)
    ]
    answers = [{"role": "tool", "tool_call_id": str(n), "content": f"answer {n}"} for n in (1, 0)]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *answers,
    ]
    text = render_chat(
        LLAMA, messages, special_tokens={"bos_token": ""}, template_kwargs={"date_string": "today"}
    )
    places = [text.index(each) for each in ('"name": "f0"', "answer 0", '"name": "f1"', "answer 1")]
    assert places == sorted(places)


def test_tool_call_is_text_if_the_template_ignores_it() -> None:
    function = {"name": "f", "arguments": '{"city": "Zürich"}'}
    call = {"id": "1", "type": "function", "function": function}
    asked = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
    ]
    told = [
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
        {"role": "user", "content": "And?"},
    ]
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Zürich"}}\n</tool_call>'
    answers = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert reshaped([*asked, *told], CallShape(calls="text", answers="user")) == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": f"Well.\n{text}\n{text}"},
        {"role": "user", "content": f"{answers}\nAnd?"},
    ]
