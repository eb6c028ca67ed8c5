"""Shapes of tool calls and answers. A probe finds the shape that a chat template renders, and
`reshaped` rewrites a conversation to it.

Many templates render tool calls and answers. Some accept one call per message, or only ids of nine
letters. Others know no tools: calls become assistant text and answers become user text, between
the tags that most models know. Nothing is dropped.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from nano_inference.text.turns import (
    Message,
    Render,
    joined,
    text_part,
)


@dataclass(frozen=True)
class CallShape:
    """Shape of calls and answers that a template renders.

    Attributes:
        null_content: True if content next to calls may be None. False: it is "".
        object_arguments: True if arguments are an object. False: JSON text.
        calls: Calls of a turn in one message, in a message per call, or as text.
        answers: Role of answers. With "user" they are text.
        short_ids: True if ids of calls must be nine letters or digits.
        one_text: True if a message with calls may have reasoning or content but not both. Both are
            then joined as reasoning.
    """

    null_content: bool = True
    object_arguments: bool = True
    calls: Literal["together", "single", "text"] = "together"
    answers: Literal["tool", "user"] = "tool"
    short_ids: bool = False
    one_text: bool = False


NATIVE = CallShape()  # the first shape to probe
# calls and answers as text: every template that renders a chat renders these
_AS_TEXT = CallShape(calls="text", answers="user")


def calls_of(message: Message) -> list[Message]:
    """Return the well-formed calls of a message."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [
        call for call in calls if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]


def object_of(arguments: object) -> object:
    """Parse JSON text of an object. Return any other value unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json.loads(arguments) if arguments.strip() else {}
        json.dumps(decoded, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


# -- probing a template ----------------------------------------------------------------------------


class ProbeWords(NamedTuple):
    """Words of a call and its answer, all of which a well-rendered probe contains."""

    name: str
    key: str
    value: str
    answer: str


def ask(word: str, render: Render) -> CallShape:
    """Probe a template for the shape that it renders. `word` must occur in no template."""
    opening: list[Message] = [{"role": "user", "content": word}]
    if word not in render(opening):  # some templates require a system message
        opening.insert(0, {"role": "system", "content": word})
    words = [ProbeWords(*(f"{word}{letter}{number}" for letter in "nkva")) for number in range(2)]
    tools = [probe_tool(each.name, each.key) for each in words]
    before = render(opening, tools)

    def conversation(shape: CallShape, content: str | None) -> list[Message]:
        return [
            *copy.deepcopy(opening),
            *reshaped([probe_calls(words, content), *map(probe_answer, words)], shape),
        ]

    def works(shape: CallShape) -> bool:
        text = render(conversation(shape, None), tools)
        if not all(_well_rendered(text, before, each) for each in words):
            return False
        spoken = render(conversation(shape, word), tools)
        return _nothings(text) <= max(_nothings(before), _nothings(spoken))

    for calls, answers, short, objects, null in product(
        ("together", "single"), ("tool", "user"), (False, True), (True, False), (True, False)
    ):
        shape = CallShape(null, objects, calls, answers, short)
        if works(shape):
            both = conversation(shape, word)
            for message in both:
                if calls_of(message):
                    message |= dict.fromkeys(REASONING, word)
            return replace(shape, one_text=not render(both, tools))
    as_text = replace(_AS_TEXT, answers="tool")
    return as_text if works(as_text) else _AS_TEXT


def probe_tool(name: str, key: str) -> Message:
    """Build a tool with one parameter."""
    parameters = {"type": "object", "properties": {key: {"type": "string", "description": key}}}
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": parameters},
    }


def probe_calls(words: Sequence[ProbeWords], content: object) -> Message:
    """Build a message of the assistant with a call for each of the words."""
    calls = [
        {
            "id": f"call_{each.name}",
            "type": "function",
            "function": _function(each.name, {each.key: each.value}),
        }
        for each in words
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def probe_answer(words: ProbeWords) -> Message:
    """Build the answer to a call of `probe_calls`."""
    return {
        "role": "tool",
        "content": words.answer,
        "tool_call_id": f"call_{words.name}",
        "name": words.name,
    }


def _function(name: str, arguments: Message) -> Message:
    return {"name": name, "arguments": arguments}


def _well_rendered(text: str, before: str, words: ProbeWords) -> bool:
    """Return True if a text contains all of a call and its answer, with arguments neither in Python
    syntax nor as JSON within JSON.
    """
    there = all(text.count(each) > before.count(each) for each in words)
    return there and not any(
        text.count(f"{quote}{words.key}") > before.count(f"{quote}{words.key}") for quote in _ODD
    )


_ODD = ("'", '\\"')


def _nothings(text: str) -> int:
    """Count the words `None` and `null`, which a template may print for missing content."""
    return len(re.findall(r"\b(?:None|null)\b", text))


# -- rewriting a conversation ----------------------------------------------------------------------


def reshaped(conversation: Iterable[Message], shape: CallShape) -> list[Message]:
    """Return the conversation in a shape. Changes messages in place."""
    messages = list(conversation)
    if shape.short_ids:
        _shorten_ids(messages)
    if shape.calls == "single":
        messages = list(_one_call_each(messages))
    for message in messages:
        if shape.calls == "text":
            _write_calls(message)
        else:
            _shape_calls(message, shape)
    return _answers_of_users(messages) if shape.answers == "user" else messages


def _shape_calls(message: Message, shape: CallShape) -> None:
    calls = calls_of(message)
    if calls and shape.one_text and message.get("content") and message.get(REASONING[0]):
        both = joined(message[REASONING[0]], message["content"])
        message |= {"content": None, **dict.fromkeys(REASONING, both)}
    if calls and message.get("content") is None:
        message["content"] = None if shape.null_content else ""
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments")
        if shape.object_arguments:
            function["arguments"] = object_of(arguments)
        elif isinstance(arguments, dict):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)


def _write_calls(message: Message) -> None:
    calls = message.pop("tool_calls", None)
    if isinstance(calls, list) and calls:
        texts = [f"<tool_call>\n{_json_of(call)}\n</tool_call>" for call in calls]
        message["content"] = joined(message.get("content"), "\n".join(texts))


def _json_of(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        fields: Message = function
        arguments: Any = object_of(fields.get("arguments") or {})
        call = _function(fields.get("name", ""), arguments)
    return json.dumps(call, ensure_ascii=False)


def _answers_of_users(messages: Iterable[Message]) -> list[Message]:
    """Turn answers into user text, joined with adjacent user messages, since some templates require
    alternating turns.
    """
    turns: list[Message] = []
    answers = False  # True if the last turn has answers
    for message in messages:
        is_answer = message.get("role") == "tool"
        if is_answer:
            message = {"role": "user", "content": _tagged(message.get("content"))}
        if (
            turns
            and message.get("role") == turns[-1].get("role") == "user"
            and (answers or is_answer)
        ):
            turns[-1]["content"] = joined(turns[-1].get("content"), message.get("content"))
            answers = True
        else:
            turns.append(message)
            answers = is_answer
    return turns


def _tagged(content: object) -> object:
    opening, close = "<tool_response>\n", "\n</tool_response>"
    if isinstance(content, list):
        return [text_part(opening), *content, text_part(close)]
    return f"{opening}{'' if content is None else content}{close}"


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield one message per call, followed by its answers. Content stays with the first call."""
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            yield message
            continue
        answers: dict[str, list[Message]] = {}  # by the ids of their calls
        while index < len(messages) and messages[index].get("role") == "tool":
            answers.setdefault(str(messages[index].get("tool_call_id")), []).append(messages[index])
            index += 1
        for number, call in enumerate(calls):
            yield {
                **(message if not number else {"role": "assistant", "content": None}),
                "tool_calls": [call],
            }
            yield from answers.pop(str(call.get("id")) if isinstance(call, dict) else "", ())
        yield from (each for others in answers.values() for each in others)


def _shorten_ids(messages: Iterable[Message]) -> None:
    for message in messages:
        for call in calls_of(message):
            call["id"] = _short(call.get("id"))
        if "tool_call_id" in message:
            message["tool_call_id"] = _short(message["tool_call_id"])


def _short(name: object) -> str:
    """Return nine letters or digits for an id, the same for the same id."""
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9]{9}", name):
        return name
    return hashlib.sha256(str(name).encode()).hexdigest()[:9]


REASONING = ("reasoning_content", "reasoning", "thinking")  # three names of one field
