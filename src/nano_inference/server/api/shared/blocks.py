"""Pieces of an answer as blocks that never overlap, for protocols whose streams are made of these:
thinking, text, and calls of tools.
"""

from typing import Any, Literal

from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.choices import ChoiceDelta

Event = dict[str, Any]
Kind = Literal["thinking", "text", "call"]
_KINDS: tuple[Kind, Kind] = ("thinking", "text")


class Blocks:
    """Opens and closes blocks; a protocol says by which events, and gathers these in `_events`.

    White space before a text says nothing, and is held back until there is more. What is said while
    a call is open waits for its end.

    Args:
        one_call: leave out all calls but the first.
    """

    def __init__(self, *, one_call: bool = False) -> None:
        self._one_call = one_call
        self._open: Kind | None = None
        self._held: dict[Kind, str] = {"thinking": "", "text": ""}
        self._answered = False  # text or a call
        self._events: list[Event] = []

    def opened(self, kind: Kind, call: ToolCallDelta | None) -> None:
        """A block begins. `call`: of a call; has its id and name."""
        raise NotImplementedError

    def said(self, kind: Kind, text: str) -> None:
        """More of the open block; of a call: of its arguments."""
        raise NotImplementedError

    def closed(self, kind: Kind) -> None:
        """The open block ends."""
        raise NotImplementedError

    def broke(self) -> None:
        """The open block is a call that turned out to be none; its text follows."""

    def push(self, piece: ChoiceDelta) -> list[Event]:
        """The events of what is new of the answer."""
        if piece.reasoning:
            self._say("thinking", piece.reasoning)
        if piece.content:
            self._say("text", piece.content)
        for call in piece.tool_calls:
            if not (self._one_call and call.index):
                self._call(call)
        return self._taken()

    def end(self) -> list[Event]:
        """The answer has ended: the events that are left."""
        self._close()
        if self._held["text"] and not self._answered:
            self._begin("text")
            self.said("text", self._held["text"])
            self._close()
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, kind: Kind, text: str) -> None:
        if self._open == "call":  # it may go on, so its block cannot be closed yet
            self._held[kind] += text
            return
        if self._open != kind:
            text = self._held[kind] + text
            if text.isspace():
                self._held[kind] = text
                return
            self._held[kind] = ""
            self._close()
            self._begin(kind)
        self.said(kind, text)

    def _call(self, call: ToolCallDelta) -> None:
        if call.broken:
            if call.id is None and self._open == "call":
                self.broke()
                self._close()
            return
        if call.id is not None:
            self._close()
            self._begin("call", call)
        if call.arguments:
            self.said("call", call.arguments)

    def _begin(self, kind: Kind, call: ToolCallDelta | None = None) -> None:
        self._open = kind
        self._answered = self._answered or kind != "thinking"
        self.opened(kind, call)

    def _close(self) -> None:
        """End the open block; then say what was said during a call."""
        while self._open is not None:
            was, self._open = self._open, None
            self.closed(was)
            if was == "call":
                for kind in _KINDS:
                    if held := self._held[kind]:
                        self._held[kind] = ""
                        self._say(kind, held)
