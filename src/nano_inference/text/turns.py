"""Turns that a template may not render where clients put them: system messages that are not the
first, and what a user says beside the answers of tools. A template is asked, as for calls; what it
does not render there goes where it does. Nothing is dropped.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Render = Callable[..., str]  # messages -> the text, or nothing if the template fails on them

SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class TurnShape:
    """What a template renders.

    Attributes:
        system: a system message at the beginning.
        many_openings: several system messages at the beginning.
        later_systems: system messages behind others.
        before_answers: what a user says between calls and their answers.
        behind_answers: what a user says directly behind answers.
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
    """Which turns a template renders.

    Args:
        word: one that no template holds.
        render: gives the text of messages.
        opening: messages that a conversation begins with, up to a user's.
        asked: `opening` and a call, in a shape that the template renders.
        answer: of the call.
    """

    def shows(before: Sequence[Message], *said: Message) -> bool:
        """Whether all that is said is there."""
        told = [
            each if each["role"] == "tool" else each | {"content": f"{word}x{number}x"}
            for number, each in enumerate(said)
        ]
        text = render(copy.deepcopy([*before, *told]))
        return all(each["content"] in text for each in told)

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
    """The conversation with turns that the template renders. Messages are changed in place."""
    messages = list(conversation)
    if not shape.many_openings:
        messages = _one_opening(messages)
    if not (shape.system and shape.later_systems):
        messages = _systems_said(messages, _num_openings(messages) if shape.system else 0)
    if not shape.before_answers:
        messages = _answers_first(messages)
    return messages if shape.behind_answers else _said_in_answers(messages)


def joined(content: object, more: object, between: str = "\n") -> object:
    """Two contents, the one behind the other."""
    if content in (None, "", []):
        return more
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}{between}{more}"
    return [*_parts(content), text_part(between), *_parts(more)]


def _parts(content: object) -> list[Any]:
    return content if isinstance(content, list) else [text_part(content)]


def text_part(text: object) -> Message:
    """Text as a part of a content."""
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
    """System messages behind the first so many as a user's text, in one message with what the user
    says there.
    """
    told = messages[:keep]
    was_system = False
    for message in messages[keep:]:
        is_system = message.get("role") in SYSTEM
        if is_system:
            message["role"] = "user"
        if (is_system or was_system) and message.get("role") == "user" and _ends_with(told, "user"):
            told[-1]["content"] = joined(told[-1].get("content"), message.get("content"))
        else:
            told.append(message)
        was_system = is_system or (was_system and message is not told[-1])
    return told


def _ends_with(messages: Sequence[Message], role: str) -> bool:
    return bool(messages) and messages[-1].get("role") == role


def _answers_first(messages: Sequence[Message]) -> list[Message]:
    """What a user says between calls and answers stands behind the answers."""
    told, said = list[Message](), list[Message]()
    for place, message in enumerate(messages):
        behind_calls = _ends_with(told, "assistant") and bool(told[-1].get("tool_calls"))
        more = any(each.get("role") == "tool" for each in _run(messages, place))
        if message.get("role") == "user" and more and (behind_calls or _ends_with(told, "tool")):
            said.append(message)
            continue
        if message.get("role") != "tool":
            told += said
            said = []
        told.append(message)
    return [*told, *said]


def _run(messages: Sequence[Message], place: int) -> list[Message]:
    """Messages of users and tools from this one on."""
    end = place
    while end < len(messages) and messages[end].get("role") in ("user", "tool"):
        end += 1
    return list(messages[place:end])


def _said_in_answers(messages: Iterable[Message]) -> list[Message]:
    """What a user says directly behind an answer is a part of it."""
    told = list[Message]()
    for message in messages:
        if message.get("role") == "user" and _ends_with(told, "tool"):
            told[-1]["content"] = joined(told[-1].get("content"), message.get("content"))
        else:
            told.append(message)
    return told
