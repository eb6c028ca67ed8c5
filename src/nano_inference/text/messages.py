"""Conversations in the form that a chat template renders.

Clients send every form that their protocol allows. Templates render some of them, and no file says
which. Each template is therefore probed once: it renders a test conversation in every form.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.text import sandbox
from nano_inference.text.budget import OverBudget
from nano_inference.text.call_shapes import (
    NATIVE,
    REASONING,
    CallShape,
    ProbeWords,
    ask,
    calls_of,
    probe_answer,
    probe_calls,
    probe_tool,
    reshaped,
)
from nano_inference.text.turns import (
    ANY_TURNS,
    Message,
    Render,
    TurnShape,
    ask_turns,
    in_turns,
)

Messages = Sequence[Mapping[str, object]]

# variables that the renderer sets, so that a request may not
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
# roles that every template gets
_ROLES = frozenset(("developer", "system", "user", "assistant", "tool"))


def plain(value: object) -> Any:
    """Return a copy made of plain types. Methods of other objects could break out of the sandbox.

    Raises:
        InvalidRequest: A value has another type, contains itself, or is text with half of a
            surrogate pair.
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
        f"a chat message contains a value of type {type(value).__name__}; "
        "use only strings, numbers, lists and mappings"
    )


def require_unicode(text: str, what: str) -> None:
    """Raise `InvalidRequest`, which names `what`, for a text that cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{what} contains half of a surrogate pair, which is not a character"
        ) from None


def _text(value: str) -> str:
    require_unicode(value, "a chat message")
    return str.__str__(value)  # str() of an enum member would return its name


def checked_kwargs(
    kwargs: Mapping[str, object], special_tokens: Mapping[str, str]
) -> dict[str, Any]:
    """Return a caller's variables for the template as plain data.

    Raises:
        InvalidRequest: A name is reserved or not an identifier, or a value is not plain data.
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
    """Return the conversation as plain data, in the form that this template renders.

    - Text parts become one string, or a string becomes a text part.
    - Arguments of tool calls become an object, or JSON text.
    - Missing content becomes None or "".
    - Calls and answers that the template does not render become text (`reshaped`). So do unrendered
      system messages, and user messages next to answers (`in_turns`).
    - A tool's answer gets the tool's name.
    - The role `developer` becomes `system` if the template does not know it.
    - Reasoning is set under all of its names.

    Raises:
        InvalidRequest: A message is not plain data, or has an unknown role that the template does
            not render.
    """
    known = tuple(sorted(special_tokens.items()))
    shapes = _shapes(template, known)
    conversation = [_without_nulls(plain(message)) for message in messages]
    names: dict[object, object] = {}  # id of a call -> name of its tool
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
        if thoughts := [message[name] for name in REASONING if name in message]:
            message |= {name: message.get(name, thoughts[0]) for name in REASONING}
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
    """Return a message without null fields. Clients send them, and templates test for keys."""
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
    """Forms that a template renders."""

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
        # always one part, so that two joined parts cannot form a control token
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
    except OverBudget:  # real messages would exceed it too
        return _Shapes()
    return _Shapes(string_content, list_content, calls, turns)


def _ask_turns(word: str, render: Render, calls: CallShape) -> TurnShape:
    opening: list[Message] = [{"role": "user", "content": word}]
    if word not in render(opening):
        opening.insert(0, {"role": "system", "content": word})
    words = ProbeWords(*(f"{word}{letter}" for letter in "nkva"))
    call = reshaped([probe_calls([words], None)], calls)
    asked = [*opening, *call]
    tools = [probe_tool(words.name, words.key)]
    shape = ask_turns(
        word,
        lambda messages: render(messages, tools if calls_of(asked[-1]) else None),
        opening,
        asked,
        probe_answer(words),
    )
    if calls.answers == "user":  # answers are joined with user messages
        return replace(shape, before_answers=True, behind_answers=True)
    return shape


def _new_word() -> str:
    return "w" + secrets.token_hex(8)


def _probe_of(template: str, special_tokens: tuple[tuple[str, str], ...]) -> Render:
    def probe(messages: Messages, tools: object = None) -> str:
        """Return the rendered text, or an empty one if the template fails."""
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
    """Return True if the template renders messages of a role. Also true if it fails on all of them
    and so reports the problem itself.
    """
    word, probe = _new_word(), _probe_of(template, special_tokens)
    shapes = _shapes(template, special_tokens)
    tested, other = {"role": role, "content": word}, {"role": "user", "content": "x"}
    reply = {"role": "assistant", "content": "x"}
    orders = [tested], [tested, other], [other, tested], [other, reply, tested]
    try:
        texts = [probe(_shaped([dict(each) for each in order], shapes)) for order in orders]
        return any(word in text for text in texts) or not any(texts)
    except OverBudget:
        return False


def _content_shapes(word: str, probe: Render) -> tuple[bool, bool]:
    """Return two flags: True if content may be a string, and True if it may be a list of text
    parts.
    """
    whole = probe([{"role": "user", "content": word}])
    parts = probe([{"role": "user", "content": [{"type": "text", "text": word}]}])
    if word in whole:
        return True, parts == whole
    list_content = word in parts and f"'{word}" not in parts
    # if neither works, the template requires more than a user message
    return not list_content, list_content
