"""From pieces of a choice to Anthropic's content blocks: one after the other in a stream, or all at
once.

Thinking comes first, then text, then tool calls. What a model says after it has begun to call tools
is a block after them in a stream, and in an answer as a whole it stands with the rest of the text.
White space alone makes no block, unless it is all that the model said.
"""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic_core import from_json

from nano_inference.serving.choices import Choice, Piece
from nano_inference.serving.parsing import ToolCallDelta

Event = dict[str, Any]
Kind = Literal["thinking", "text"]

_EMPTY: Mapping[Kind, Event] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_KINDS: tuple[Kind, Kind] = ("thinking", "text")


def signature(thinking: str) -> str:
    """What vouches for a thinking block: a digest of it. Nothing checks it; clients want one to be
    there.
    """
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def tool_use_id(call_id: str) -> str:
    """A tool call's id as Anthropic writes them."""
    return "toolu_" + call_id.removeprefix("call_")


def blocks_of(
    choice: Choice, *, omit_thinking: bool = False, one_tool: bool = False
) -> list[dict[str, Any]]:
    """The content blocks of a choice that has ended. Arguments: see `BlockStream`."""
    blocks: list[dict[str, Any]] = []
    calls = choice.tool_calls[:1] if one_tool else choice.tool_calls
    if choice.reasoning.strip():
        shown = "" if omit_thinking else choice.reasoning
        blocks.append(
            {"type": "thinking", "thinking": shown, "signature": signature(choice.reasoning)}
        )
    if choice.content.strip() or (choice.content and not calls):
        blocks.append({"type": "text", "text": choice.content})
    for call in calls:
        given = _object(call.arguments)
        blocks.append(
            {"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": given}
        )
    return blocks


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut off, as far as they came, as SDKs read a
    stream.
    """
    try:
        value = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class BlockStream:
    """Turns pieces into the events of blocks that never overlap.

    Args:
        omit_thinking: show that there was thinking, but not what.
        one_tool: leave out all calls but the first.
    """

    def __init__(self, *, omit_thinking: bool = False, one_tool: bool = False) -> None:
        self._omit_thinking = omit_thinking
        self._one_tool = one_tool
        self._events: list[Event] = []
        self._index = -1  # of the last block
        self._open: Kind | Literal["tool_use"] | None = None
        self._thought: list[str] = []  # in the open block
        # white space, or what was said during a call
        self._held: dict[Kind, str] = {"thinking": "", "text": ""}
        self._said = False  # text or a call

    def push(self, piece: Piece) -> list[Event]:
        """The events of a piece."""
        if piece.reasoning:
            self._say("thinking", piece.reasoning)
        if piece.content:
            self._say("text", piece.content)
        for call in piece.tool_calls:
            if not (self._one_tool and call.index):
                self._call(call)
        return self._taken()

    def finish(self) -> list[Event]:
        """The events that are left."""
        self._close()
        if self._held["text"] and not self._said:
            self._start("text", _EMPTY["text"])
            self._delta({"type": "text_delta", "text": self._held["text"]})
            self._close()
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, kind: Kind, text: str) -> None:
        if self._open == "tool_use":  # a call may go on, so its block cannot be closed yet
            self._held[kind] += text
            return
        if self._open != kind:
            text = self._held[kind] + text
            if text.isspace():
                self._held[kind] = text
                return
            self._held[kind] = ""
            self._close()
            self._start(kind, _EMPTY[kind])
        if kind == "text":
            self._delta({"type": "text_delta", "text": text})
            return
        self._thought.append(text)
        if not self._omit_thinking:
            self._delta({"type": "thinking_delta", "thinking": text})

    def _call(self, call: ToolCallDelta) -> None:
        if call.id is not None:
            self._close()
            block = {
                "type": "tool_use",
                "id": tool_use_id(call.id),
                "name": call.name or "",
                "input": {},
            }
            self._start("tool_use", block)
        if call.arguments:
            self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _start(self, kind: Kind | Literal["tool_use"], block: Event) -> None:
        self._index += 1
        self._open = kind
        self._said = self._said or kind != "thinking"
        self._events.append(
            {"type": "content_block_start", "index": self._index, "content_block": block}
        )

    def _delta(self, delta: Event) -> None:
        self._events.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> None:
        """End the open block; then say what was said during a call."""
        while self._open is not None:
            was, self._open = self._open, None
            if was == "thinking":
                self._delta(
                    {"type": "signature_delta", "signature": signature("".join(self._thought))}
                )
                self._thought = []
            self._events.append({"type": "content_block_stop", "index": self._index})
            if was == "tool_use":
                for kind in _KINDS:
                    if held := self._held[kind]:
                        self._held[kind] = ""
                        self._say(kind, held)
