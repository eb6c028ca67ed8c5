"""Conversations as chat templates expect them: plain data, in the shapes that the template renders.

Clients send what their protocol allows. Templates differ in which of it they render, and say so
nowhere, so each is asked once: a probe in every shape, and a look at what comes out.

Many templates render tool calls and their answers. Some take one call a message, some no ids but
those of nine letters, and many know no tools at all: there a call becomes text of the assistant's,
and an answer text of the user's, between the tags that most models know. Nothing is dropped.
"""

import copy
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal, NamedTuple

from nano_inference.errors import InvalidRequest
from nano_inference.text import sandbox
from nano_inference.text.sandbox import OverBudget
from nano_inference.text.turns import (
    ANY_TURNS,
    Message,
    Render,
    TurnShape,
    ask_turns,
    in_turns,
    joined,
    text_part,
)


@dataclass(frozen=True)
class CallShape:
    """What a template renders of calls and answers.

    Attributes:
        null_content: the content beside calls may be None; else it is "".
        object_arguments: arguments are an object; else JSON text.
        calls: those of one turn in one message, or each in a message of its own; or as text.
        answers: by whom they are: a tool, or the user, as text.
        short_ids: ids of calls are nine letters or digits.
        one_text: a message of calls has reasoning or content, not both; then it has both as
            reasoning.
    """

    null_content: bool = True
    object_arguments: bool = True
    calls: Literal["together", "single", "text"] = "together"
    answers: Literal["tool", "user"] = "tool"
    short_ids: bool = False
    one_text: bool = False


NATIVE = CallShape()  # the first that a template is asked for
# which every template renders that renders a chat
_AS_TEXT = CallShape(calls="text", answers="user")


def calls_of(message: Message) -> list[Message]:
    """The calls of a message that are well formed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [
        call for call in calls if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]


def object_of(arguments: object) -> object:
    """JSON text of an object as the object; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json.loads(arguments) if arguments.strip() else {}
        json.dumps(decoded, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except (ValueError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


# -- asking a template -----------------------------------------------------------------------------


class _Words(NamedTuple):
    """What is looked for in a rendered call."""

    name: str
    key: str
    value: str
    answer: str


def ask(word: str, render: Render) -> CallShape:
    """Which shape a template renders well. `word`: one that no template holds."""
    opening: list[Message] = [{"role": "user", "content": word}]
    if word not in render(opening):  # some begin with a system message
        opening.insert(0, {"role": "system", "content": word})
    words = [_Words(*(f"{word}{letter}{number}" for letter in "nkva")) for number in range(2)]
    tools = [_tool(each.name, each.key) for each in words]
    before = render(opening, tools)

    def conversation(shape: CallShape, content: str | None) -> list[Message]:
        return [
            *copy.deepcopy(opening),
            *reshaped([_asking(words, content), *map(_answering, words)], shape),
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
                    message |= dict.fromkeys(_REASONING, word)
            return replace(shape, one_text=not render(both, tools))
    as_text = replace(_AS_TEXT, answers="tool")
    return as_text if works(as_text) else _AS_TEXT


def _tool(name: str, key: str) -> Message:
    parameters = {"type": "object", "properties": {key: {"type": "string", "description": key}}}
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": parameters},
    }


def _asking(words: Sequence[_Words], content: object) -> Message:
    calls = [
        {
            "id": f"call_{each.name}",
            "type": "function",
            "function": _function(each.name, {each.key: each.value}),
        }
        for each in words
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _answering(words: _Words) -> Message:
    return {
        "role": "tool",
        "content": words.answer,
        "tool_call_id": f"call_{words.name}",
        "name": words.name,
    }


def _function(name: str, arguments: Message) -> Message:
    return {"name": name, "arguments": arguments}


def _well_rendered(text: str, before: str, words: _Words) -> bool:
    """All of a call and its answer is there, and arguments are neither Python's nor JSON within
    JSON.
    """
    there = all(text.count(each) > before.count(each) for each in words)
    return there and not any(
        text.count(f"{quote}{words.key}") > before.count(f"{quote}{words.key}") for quote in _ODD
    )


_ODD = ("'", '\\"')


def _nothings(text: str) -> int:
    """How often the absence of a content may have become a word."""
    return len(re.findall(r"\b(?:None|null)\b", text))


# -- rewriting a conversation ----------------------------------------------------------------------


def reshaped(conversation: Iterable[Message], shape: CallShape) -> list[Message]:
    """The conversation in a shape. Messages are changed in place."""
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
    if calls and shape.one_text and message.get("content") and message.get(_REASONING[0]):
        both = joined(message[_REASONING[0]], message["content"])
        message |= {"content": None, **dict.fromkeys(_REASONING, both)}
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
        given: Message = function
        arguments: Any = object_of(given.get("arguments") or {})
        call = _function(given.get("name", ""), arguments)
    return json.dumps(call, ensure_ascii=False)


def _answers_of_users(messages: Iterable[Message]) -> list[Message]:
    """Answers as text of the user, in one message with what else is said, as turns may have to
    alternate.
    """
    told: list[Message] = []
    answers = False  # whether the last of them holds some
    for message in messages:
        is_answer = message.get("role") == "tool"
        if is_answer:
            message = {"role": "user", "content": _tagged(message.get("content"))}
        if (
            told
            and message.get("role") == told[-1].get("role") == "user"
            and (answers or is_answer)
        ):
            told[-1]["content"] = joined(told[-1].get("content"), message.get("content"))
            answers = True
        else:
            told.append(message)
            answers = is_answer
    return told


def _tagged(content: object) -> object:
    opening, close = "<tool_response>\n", "\n</tool_response>"
    if isinstance(content, list):
        return [text_part(opening), *content, text_part(close)]
    return f"{opening}{'' if content is None else content}{close}"


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """A message a call, each with its answers behind it. What is said stands before the first."""
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            yield message
            continue
        answers: dict[str, list[Message]] = {}  # by the ids of their calls
        while place < len(messages) and messages[place].get("role") == "tool":
            answers.setdefault(str(messages[place].get("tool_call_id")), []).append(messages[place])
            place += 1
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
    """The same nine letters and digits for the same id."""
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9]{9}", name):
        return name
    return hashlib.sha256(str(name).encode()).hexdigest()[:9]


Messages = Sequence[Mapping[str, object]]

# Variables that a request may not set: the renderer sets them itself.
_RESERVED = frozenset(
    {
        *(
            "messages",
            "conversation",
            "tools",
            "documents",
            "add_generation_prompt",
            "continue_final_message",
        ),
        *(
            "tokenize",
            "tokenizer",
            "chat_template",
            "template",
            "truncation",
            "padding",
            "max_length",
        ),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("self", "context", "environment", "loop", "caller", "varargs", "kwargs"),
    }
)
# which any template is sent
_ROLES = frozenset(("developer", "system", "user", "assistant", "tool"))
_REASONING = ("reasoning_content", "reasoning", "thinking")  # one thing by three names


def plain(value: object) -> Any:
    """A copy out of plain types only: the sandbox cannot know which methods of any other object do
    harm.

    Raises:
        InvalidRequest: it holds something else, text that is no Unicode, or itself.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise InvalidRequest("a chat message is nested too deeply to be rendered") from None


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise InvalidRequest(
        f"a chat message holds a {type(value).__name__}; strings, numbers, lists and mappings can "
        "be rendered"
    )


def require_unicode(text: str, what: str) -> None:
    """Raise `InvalidRequest`, which names `what`, for a text that no encoding can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{what} holds half of a surrogate pair, which is no character"
        ) from None


def _text(value: str) -> str:
    require_unicode(value, "a chat message")
    return str.__str__(value)  # str() of an enumeration's member would be its name


def checked_kwargs(
    kwargs: Mapping[str, object], special_tokens: Mapping[str, str]
) -> dict[str, Any]:
    """Variables for the template that a caller may set.

    Raises:
        InvalidRequest: a name is taken or is no variable's, or a value is not plain data.
    """
    for name in kwargs:
        taken = (
            name in _RESERVED
            or name in special_tokens
            or name.endswith("_token")
            or name in sandbox.global_names()
        )
        if taken or name.startswith("_") or not name.isidentifier():
            raise InvalidRequest(
                f"the chat template's variable {name[:100]!r} cannot be set by a request; leave "
                "it out"
            )
    return plain(kwargs)


def prepare(
    template: str, messages: Messages, special_tokens: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The conversation as plain data, in the shapes that this template renders.

    Text parts become one string, or a string becomes a text part; arguments of tool calls become an
    object, or JSON text; the absence of content becomes what the template can stand; calls and
    answers that it does not render become text (`reshaped`); so do system messages where it renders
    none, and what is said beside answers (`in_turns`); a tool's answer gets the tool's name; a
    developer is the system where the template knows no other; reasoning goes by all of its names.

    Raises:
        InvalidRequest: a message is not plain data, or has a role of its own that the template does
            not render.
    """
    known = tuple(sorted(special_tokens.items()))
    shapes = _shapes(template, known)
    conversation = [_without_nulls(plain(message)) for message in messages]
    names: dict[object, object] = {}  # of tools, by the ids of their calls
    for message in conversation:
        _check_role(message.get("role"), template, known)
        if message.get("role") == "developer" and "developer" not in template:
            message["role"] = "system"
        for call in calls_of(message):
            names[str(call.get("id"))] = call["function"].get("name")
        if (
            message.get("role") == "tool"
            and "name" not in message
            and str(message.get("tool_call_id")) in names
        ):
            message["name"] = names[str(message["tool_call_id"])]
        if told := [message[name] for name in _REASONING if name in message]:
            message |= {name: message.get(name, told[0]) for name in _REASONING}
    conversation = reshaped(in_turns(conversation, shapes.turns), shapes.calls)
    return _shaped(conversation, shapes)


def _check_role(role: object, template: str, special_tokens: tuple[tuple[str, str], ...]) -> None:
    if (
        isinstance(role, str)
        and role not in _ROLES
        and not _renders_role(role, template, special_tokens)
    ):
        raise InvalidRequest(
            f"the chat template does not render messages of the role {role[:64]!r}; use "
            f"{', '.join(sorted(_ROLES))}"
        )


def _without_nulls(message: Any) -> dict[str, Any]:
    """Clients write out what is not there. Templates ask whether a key is there."""
    if not isinstance(message, dict):
        raise InvalidRequest(
            f"a chat message is a {type(message).__name__}; give a mapping with role and content"
        )
    kept = {key: item for key, item in message.items() if item is not None or key == "content"}
    if kept.get("tool_calls") == []:
        del kept["tool_calls"]
    return kept


@dataclass(frozen=True)
class _Shapes:
    """What a template renders."""

    string_content: bool = True
    list_content: bool = False
    calls: CallShape = NATIVE
    turns: TurnShape = ANY_TURNS


def _shaped(conversation: list[dict[str, Any]], shapes: _Shapes) -> list[dict[str, Any]]:
    for message in conversation:
        _shape_content(message, shapes)
    return conversation


def _shape_content(message: dict[str, Any], shapes: _Shapes) -> None:
    content = message.get("content")
    if not content and calls_of(message):
        return
    if content is None:
        message["content"] = content = ""
    if isinstance(content, str) and not shapes.string_content:
        message["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        text = "".join(part["text"] for part in content)
        keep = shapes.list_content and not (shapes.string_content and message.get("role") != "user")
        # One part in any case: what is written in two pieces shall not become a control token when
        # they are joined.
        message["content"] = [{**content[0], "text": text}] if keep else text


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    )


@lru_cache(maxsize=16)
def _shapes(template: str, special_tokens: tuple[tuple[str, str], ...]) -> _Shapes:
    word, probe = _new_word(), _probe_of(template, special_tokens)
    try:
        string_content, list_content = _content_shapes(word, probe)
        contents = _Shapes(string_content, list_content)

        def render(messages: list[Message], tools: object = None) -> str:
            return probe(_shaped(messages, contents), tools)

        calls = ask(word, render)
        turns = _ask_turns(word, render, calls)
    except OverBudget:  # it will be so with real messages too
        return _Shapes()
    return _Shapes(string_content, list_content, calls, turns)


def _ask_turns(word: str, render: Render, calls: CallShape) -> TurnShape:
    opening: list[Message] = [{"role": "user", "content": word}]
    if word not in render(opening):
        opening.insert(0, {"role": "system", "content": word})
    words = _Words(*(f"{word}{letter}" for letter in "nkva"))
    call = reshaped([_asking([words], None)], calls)
    asked = [*opening, *call]
    tools = [_tool(words.name, words.key)]
    shape = ask_turns(
        word,
        lambda messages: render(messages, tools if calls_of(asked[-1]) else None),
        opening,
        asked,
        _answering(words),
    )
    if calls.answers == "user":  # they are one message with what the user says
        return replace(shape, before_answers=True, behind_answers=True)
    return shape


def _new_word() -> str:
    return "w" + secrets.token_hex(8)


def _probe_of(template: str, special_tokens: tuple[tuple[str, str], ...]) -> Render:
    def probe(messages: Messages, tools: object = None) -> str:
        """What the template makes of it, or nothing."""
        variables = {
            "tools": tools,
            "documents": None,
            "add_generation_prompt": False,
            **dict(special_tokens),
        }
        try:
            return sandbox.render(template, {**variables, "messages": messages}, max_seconds=1)
        except OverBudget:
            raise
        except Exception:  # a template's code raises anything
            return ""

    return probe


@lru_cache(maxsize=64)
def _renders_role(role: str, template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether what a message of that role says is there, or the template says itself that it is
    not.
    """
    word, probe = _new_word(), _probe_of(template, special_tokens)
    shapes = _shapes(template, special_tokens)
    own, other = {"role": role, "content": word}, {"role": "user", "content": "x"}
    places = [own], [own, other], [other, own], [other, {"role": "assistant", "content": "x"}, own]
    try:
        texts = [probe(_shaped([dict(each) for each in place], shapes)) for place in places]
        return any(word in text for text in texts) or not any(texts)
    except OverBudget:
        return False


def _content_shapes(word: str, probe: Render) -> tuple[bool, bool]:
    """Whether a content may be a string, and a list of text parts."""
    whole = probe([{"role": "user", "content": word}])
    parts = probe([{"role": "user", "content": [{"type": "text", "text": word}]}])
    if word in whole:
        return True, parts == whole
    list_content = word in parts and f"'{word}" not in parts
    # where neither works it asks for more than a user's message
    return not list_content, list_content
