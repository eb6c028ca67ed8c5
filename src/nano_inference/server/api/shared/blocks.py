"""Answers as blocks that never overlap, for protocols whose streams consist of them: thinking, text
and tool calls.
"""

from typing import Any, Literal

from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.choices import ChoiceDelta

Event = dict[str, Any]
Kind = Literal["thinking", "text", "call"]
_KINDS: tuple[Kind, Kind] = ("thinking", "text")


class Blocks:
    """Converter of pieces to blocks. A protocol overrides the methods that append its events to
    `_events`.

    Whitespace before a text is held back until more text comes. Text that comes while a call is
    open waits for the end of the call.

    Args:
        one_call: Omit all calls but the first.
    """

    def __init__(self, *, one_call: bool = False) -> None:
        self._one_call = one_call
        self._open: Kind | None = None
        self._held: dict[Kind, str] = {"thinking": "", "text": ""}
        self._answered = False  # True after text or a call
        self._events: list[Event] = []

    def opened(self, kind: Kind, call: ToolCallDelta | None) -> None:
        """Append the events that begin a block. `call` has the id and name of a tool call."""
        raise NotImplementedError

    def said(self, kind: Kind, text: str) -> None:
        """Append the events of more text in the open block, or of more arguments of its call."""
        raise NotImplementedError

    def closed(self, kind: Kind) -> None:
        """Append the events that end a block."""
        raise NotImplementedError

    def broke(self) -> None:
        """Handle an open call that turned out to be text. The text follows."""

    def push(self, piece: ChoiceDelta) -> list[Event]:
        """Return the events of the answer's new part."""
        if piece.reasoning:
            self._say("thinking", piece.reasoning)
        if piece.content:
            self._say("text", piece.content)
        for call in piece.tool_calls:
            if not (self._one_call and call.index):
                self._call(call)
        return self._taken()

    def end(self) -> list[Event]:
        """Return the remaining events at the end of the answer."""
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
        if self._open == "call":  # the call may continue, so its block must stay open
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
        """End the open block, then add the text that came during a call."""
        while self._open is not None:
            was, self._open = self._open, None
            self.closed(was)
            if was == "call":
                for kind in _KINDS:
                    if held := self._held[kind]:
                        self._held[kind] = ""
                        self._say(kind, held)
