"""Turns that some templates do not render: system messages after the first, and user messages next
to tool answers. A probe finds the turns that a template renders, and other turns move to a position
that it renders. Nothing is dropped.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Render = Callable[..., str]  # messages -> text, empty if the template fails on them

SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class TurnShape:
    """Turns that a template renders.

    Attributes:
        system: A system message at the beginning.
        many_openings: Several system messages at the beginning.
        later_systems: System messages after other messages.
        before_answers: User messages between calls and their answers.
        behind_answers: User messages directly after answers.
    """

    system: bool = True
    many_openings: bool = True
    later_systems: bool = True
    before_answers: bool = True
    behind_answers: bool = True


ANY_TURNS = TurnShape()


def ask_turns(
    word: str, render: Render, opening: Sequence[Message], asked: Sequence[Message], answer: Message
) -> TurnShape:
    """Probe a template for the turns that it renders.

    Args:
        word: Word that occurs in no template.
        render: Function from messages to their text.
        opening: First messages of a conversation, up to a user's.
        asked: `opening` and a call, in a shape that the template renders.
        answer: Answer to the call.
    """

    def shows(before: Sequence[Message], *said: Message) -> bool:
        """Return True if the text contains all messages."""
        marked = [
            each if each["role"] == "tool" else each | {"content": f"{word}x{number}x"}
            for number, each in enumerate(said)
        ]
        text = render(copy.deepcopy([*before, *marked]))
        return all(each["content"] in text for each in marked)

    system, user = {"role": "system", "content": word}, {"role": "user", "content": word}
    reply = {"role": "assistant", "content": word}
    one_opening = shows([], system, user)
    turns = shows(opening, reply, user)
    calls = shows(asked, answer)
    return TurnShape(
        system=one_opening or not shows([], user),
        many_openings=not one_opening or shows([], system, system, user),
        later_systems=not turns
        or (
            shows(opening, reply, system, user)
            and shows(opening, reply, user, system)
            and shows(opening, system, reply, user)
        ),
        before_answers=not calls or shows(asked, user, answer),
        behind_answers=not calls or shows(asked, answer, user),
    )


def in_turns(conversation: Iterable[Message], shape: TurnShape) -> list[Message]:
    """Return the conversation in turns that the template renders. Changes messages in place."""
    messages = list(conversation)
    if not shape.many_openings:
        messages = _one_opening(messages)
    if not (shape.system and shape.later_systems):
        messages = _systems_said(messages, _num_openings(messages) if shape.system else 0)
    if not shape.before_answers:
        messages = _answers_first(messages)
    return messages if shape.behind_answers else _said_in_answers(messages)


def joined(content: object, more: object, between: str = "\n") -> object:
    """Return two contents, concatenated."""
    if content in (None, "", []):
        return more
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}{between}{more}"
    return [*_parts(content), text_part(between), *_parts(more)]


def _parts(content: object) -> list[Any]:
    return content if isinstance(content, list) else [text_part(content)]


def text_part(text: object) -> Message:
    """Return text as a part of a content."""
    return {"type": "text", "text": text}


def _num_openings(messages: Sequence[Message]) -> int:
    roles = [message.get("role") in SYSTEM for message in messages]
    return [*roles, False].index(False)


def _one_opening(messages: list[Message]) -> list[Message]:
    count = _num_openings(messages)
    for message in messages[1:count]:
        messages[0]["content"] = joined(messages[0].get("content"), message.get("content"), "\n\n")
    return [*messages[: min(count, 1)], *messages[count:]]


def _systems_said(messages: list[Message], keep: int) -> list[Message]:
    """Turn system messages after the first `keep` into user text, joined with adjacent user
    messages.
    """
    turns = messages[:keep]
    was_system = False
    for message in messages[keep:]:
        is_system = message.get("role") in SYSTEM
        if is_system:
            message["role"] = "user"
        if (
            (is_system or was_system)
            and message.get("role") == "user"
            and _ends_with(turns, "user")
        ):
            turns[-1]["content"] = joined(turns[-1].get("content"), message.get("content"))
        else:
            turns.append(message)
        was_system = is_system or (was_system and message is not turns[-1])
    return turns


def _ends_with(messages: Sequence[Message], role: str) -> bool:
    return bool(messages) and messages[-1].get("role") == role


def _answers_first(messages: Sequence[Message]) -> list[Message]:
    """Move user messages between calls and answers after the answers."""
    turns, said = list[Message](), list[Message]()
    for index, message in enumerate(messages):
        after_calls = _ends_with(turns, "assistant") and bool(turns[-1].get("tool_calls"))
        more = any(each.get("role") == "tool" for each in _run(messages, index))
        if message.get("role") == "user" and more and (after_calls or _ends_with(turns, "tool")):
            said.append(message)
            continue
        if message.get("role") != "tool":
            turns += said
            said = []
        turns.append(message)
    return [*turns, *said]


def _run(messages: Sequence[Message], start: int) -> list[Message]:
    """Return consecutive messages of users and tools from an index on."""
    end = start
    while end < len(messages) and messages[end].get("role") in ("user", "tool"):
        end += 1
    return list(messages[start:end])


def _said_in_answers(messages: Iterable[Message]) -> list[Message]:
    """Join user messages directly after an answer to the answer."""
    turns = list[Message]()
    for message in messages:
        if message.get("role") == "user" and _ends_with(turns, "tool"):
            turns[-1]["content"] = joined(turns[-1].get("content"), message.get("content"))
        else:
            turns.append(message)
    return turns
