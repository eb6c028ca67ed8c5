"""Late system messages, and text next to tool results, in templates that move or reject them."""

import pytest

from nano_inference.errors import InvalidRequest
from nano_inference.text.chat import render_chat
from nano_inference.text.turns import TurnShape, in_turns

CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
)
# as in Qwen 3.5
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
# as in gpt-oss
SILENT = (
    "{% if messages[0].role in ('system', 'developer') %}[top]{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
# as in Mistral: users and assistants alternate, calls and results do not count
IN_TURNS = (
    "{% set ns = namespace(index=0) %}"
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('conversation roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "[{{ m.role }}]{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def said(text: str) -> list[dict[str, object]]:
    """Parse messages from `role: content` lines. A call is `call: name`."""
    messages: list[dict[str, object]] = []
    for line in text.split(", "):
        role, _, content = line.partition(":")
        if role == "call":
            function = {"name": content, "arguments": {"a": 1}}
            call = {"id": content, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif role == "tool":
            messages.append({"role": role, "content": content, "tool_call_id": "f"})
        else:
            messages.append({"role": role, "content": content})
    return messages


def rendered(template: str, text: str) -> str:
    return render_chat(template, said(text), special_tokens={}, add_generation_prompt=False)


@pytest.mark.parametrize("template", [FIRST, SILENT, IN_TURNS])
def test_system_messages_at_the_beginning_are_one(template: str) -> None:
    text = rendered(template, "system:a, developer:b, user:c")
    assert text.partition("]")[2] == "a\n\nb[user]c"


@pytest.mark.parametrize("template", [FIRST, SILENT, IN_TURNS])
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("user:a, assistant:b, system:c, user:d", "[user]a[assistant]b[user]c\nd"),
        ("user:a, assistant:b, user:c, system:d", "[user]a[assistant]b[user]c\nd"),
        ("user:a, assistant:b, developer:c", "[user]a[assistant]b[user]c"),
        ("user:a, system:b, assistant:c, user:d", "[user]a\nb[assistant]c[user]d"),
        ("user:a, system:b, user:c", "[user]a\nb\nc"),
        ("user:a, system:b, system:c, assistant:d, user:e", "[user]a\nb\nc[assistant]d[user]e"),
    ],
)
def test_later_system_message_becomes_a_users_text(template: str, given: str, shown: str) -> None:
    assert rendered(template, given) == shown
    with_first = rendered(template, f"system:s, {given}")
    assert with_first.endswith(shown)
    assert "]s[" in with_first


@pytest.mark.parametrize("refuses", [True, False])
def test_unsupported_system_message_becomes_a_users_text(refuses: bool) -> None:
    """Reject the message as Gemma 2 does, or omit it silently."""
    what = "{{ raise_exception('System role not supported') }}" if refuses else ""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}" + what + "{% else %}"
        "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    )
    assert rendered(template, "system:a, user:b, assistant:c") == "[user]a\nb[assistant]c"
    assert rendered(template, "system:a, system:b, user:c") == "[user]a\nb\nc"


def test_capable_template_gets_all_messages_unchanged() -> None:
    given = (
        "system:a, system:b, user:c, assistant:d, system:e, user:f, call:f, user:g, tool:h, user:i"
    )
    assert rendered(CHATML, given) == (
        "[system]a[system]b[user]c[assistant]d[system]e[user]f[assistant]"
        '<call>f{"a": 1}</call>[user]g[tool]h[user]i'
    )


def test_users_of_one_role_are_joined_only_for_a_system_message() -> None:
    assert rendered(FIRST, "user:a, user:b") == "[user]a[user]b"
    with pytest.raises(InvalidRequest, match="must alternate"):
        rendered(IN_TURNS, "user:a, user:b")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("tool:b, user:c", "[tool]b\nc"),
        ("user:c, tool:b", "[tool]b\nc"),
        ("tool:b, system:c", "[tool]b\nc"),
        ("tool:b, user:c, assistant:d, user:e", "[tool]b\nc[assistant]d[user]e"),
        ("tool:b, user:c, user:d", "[tool]b\nc\nd"),
        ("tool:b, assistant:d", "[tool]b[assistant]d"),
    ],
)
def test_text_next_to_a_call_is_placed_by_the_template(given: str, shown: str) -> None:
    text = rendered(IN_TURNS, f"user:a, call:f, {given}")
    assert text == f'[user]a[assistant]<call>f{{"a": 1}}</call>{shown}'


def test_text_between_tool_results_follows_them() -> None:
    messages = said("user:a, call:f, tool:b, user:c, tool:d, user:e, assistant:g")
    shape = TurnShape(before_answers=False)
    assert [each["content"] for each in in_turns(messages, shape)] == [
        *("a", None, "b", "d", "c", "e", "g"),
    ]
    messages = said("user:a, call:f, user:c")  # the result is still missing
    assert in_turns(list(messages), shape) == messages


def test_contents_in_parts_are_joined_too() -> None:
    part = {"type": "text", "text": "b"}
    messages = [*said("user:a, assistant:b"), {"role": "system", "content": [part]}]
    messages += said("user:c")
    text = render_chat(FIRST, messages, special_tokens={}, add_generation_prompt=False)
    assert text == "[user]a[assistant]b[user]b\nc"
