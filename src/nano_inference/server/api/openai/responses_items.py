"""Items of a response, and the events of its stream."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nano_inference.server.api.openai.chat_answer import ChatBuilder
from nano_inference.server.api.openai.responses_models import Item
from nano_inference.server.api.openai.responses_tools import (
    InputText,
    Offered,
    Offers,
    object_of,
)
from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.answers import encode_line
from nano_inference.server.api.shared.blocks import Blocks, Event, Kind
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta

_PREFIX: Mapping[Kind, str] = {"thinking": "rs", "text": "msg"}
# kind -> prefix of its text's events
_TEXT: Mapping[Kind, str] = {
    "thinking": "response.reasoning_text",
    "text": "response.output_text",
}


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{prefix}_{secrets.token_hex(24)}"


class ItemStream(Blocks):
    """Converter of pieces to events of output items, which also collects the items.

    Args:
        offers: Tools that the model sees, which determine the items of its calls.
        logprobs: Builder that makes rows of logprobs. None: the client did not ask for them.
        seal: Seals the text of reasoning. None: the client did not ask for it.
        one_call: Omit all calls but the first.
    """

    def __init__(
        self,
        offers: Offers,
        logprobs: ChatBuilder | None,
        seal: Callable[[str], str] | None,
        *,
        one_call: bool,
    ) -> None:
        super().__init__(one_call=one_call)
        self._offers = offers
        self._logprobs = logprobs
        self._seal = seal
        self._call_item: _CallItem | None = None  # the open call
        self._said: list[str] = []  # text of the open item
        self._broke = False  # True if the open item is a broken call
        self._number = 0  # number of the next event
        self._new: list[Any] = []  # logprobs of tokens whose text is still to come
        self._scored: list[Any] = []  # logprobs in the events of the open item
        self._is_cut = False  # True if the answer ended inside the open item
        self.items: list[Item] = []

    def told(self, events: Iterable[Event]) -> bytes:
        """Return events as bytes, with sequence numbers."""
        written: list[bytes] = []
        for event in events:
            line = encode_line(event | {"sequence_number": self._number})
            written.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), line))
            self._number += 1
        return b"".join(written)

    def push(self, piece: ChoiceDelta) -> list[Event]:
        """Return the events of the answer's new part, and collect its logprobs."""
        if self._logprobs is not None and piece.token_ids:
            self._new += self._logprobs.token_rows(piece)
        return super().push(piece)

    def ended(self, choice: Choice) -> list[Event]:
        """Return the remaining events. The message's item gets the logprobs of the whole answer."""
        self._is_cut = choice.finished is None or choice.finished.finish_reason != "stop"
        events = self.end()
        if self._logprobs is not None:
            rows = [*self._logprobs.token_rows(choice.whole)]
            for item in self.items:
                if item["type"] == "message":
                    item["content"][0]["logprobs"] = rows
        return events

    def opened(self, kind: Kind, call: ToolCallDelta | None) -> None:
        """Append `response.output_item.added`, and the beginning of its part."""
        self._said, self._scored = [], []
        if kind == "call":
            assert call is not None
            assert call.id is not None
            self._call_item = _CallItem(call.id, call.name or "", self._offers)
            if self._call_item.is_streamed:
                self._add(self._call_item.begun())
            return
        item: Item = {"id": new_id(_PREFIX[kind]), "status": "in_progress"}
        if kind == "thinking":
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        self._add(item)
        self._part("response.content_part.added", kind, "")

    def said(self, kind: Kind, text: str) -> None:
        """Append an event with more of the item's text, or of a call's arguments."""
        if kind == "call":
            assert self._call_item is not None
            if more := self._call_item.push(text):
                self._event(f"{self._call_item.event}.delta", **self._item_id(), delta=more)
            return
        self._said.append(text)
        self._event(f"{_TEXT[kind]}.delta", **self._where(), delta=text, **self._scores(kind))

    def broke(self) -> None:
        """Mark the open call as broken, so that clients do not run it."""
        self._broke = True

    def closed(self, kind: Kind) -> None:
        """Append the ends of text, part and item."""
        # held text follows the call, which is therefore complete
        is_last = kind != "call" or not any(self._held.values())
        is_whole = not self._broke and not (self._is_cut and is_last)
        broke, self._broke = self._broke, False
        if kind == "call":
            self._close_call(is_whole, broke)
            return
        text, item = "".join(self._said), self.items[-1]
        scores = {"logprobs": self._scored} if kind == "text" else {}
        self._event(f"{_TEXT[kind]}.done", **self._where(), text=text, **scores)
        item["content"] = [_part(kind, text)]
        if kind == "thinking" and self._seal is not None:
            item["encrypted_content"] = self._seal(text)
        self._part("response.content_part.done", kind, text)
        self._finish_item(is_whole)

    def _close_call(self, is_whole: bool, broke: bool) -> None:
        call, self._call_item = self._call_item, None
        assert call is not None
        if not call.is_streamed:
            if broke:  # nothing was sent
                return
            if (item := call.whole(is_whole)) is not None:
                self._add({**item, "status": "in_progress"})
                self._finish_item(is_whole)
                return
            call = call.as_function()
            self._add(call.begun())
            self._event(f"{call.event}.delta", **self._item_id(), delta=call.text)
        if more := call.finish():
            self._event(f"{call.event}.delta", **self._item_id(), delta=more)
        item = self.items[-1]
        name = {"name": item["name"]} if call.field == "arguments" else {}
        self._event(f"{call.event}.done", **self._item_id(), **{call.field: call.text}, **name)
        item[call.field] = call.text
        self._finish_item(is_whole)

    def _add(self, item: Item) -> None:
        self.items.append(item)
        self._event("response.output_item.added", item=dict(item))

    def _finish_item(self, is_whole: bool) -> None:
        item = self.items[-1]
        item["status"] = "completed" if is_whole else "incomplete"
        self._event("response.output_item.done", item=dict(item))

    def _scores(self, kind: Kind) -> dict[str, Any]:
        if kind != "text":
            return {}
        new, self._new = self._new, []
        self._scored += new
        return {"logprobs": new}

    def _part(self, name: str, kind: Kind, text: str) -> None:
        self._event(name, **self._where(), part=_part(kind, text))

    def _item_id(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"]}

    def _where(self) -> dict[str, Any]:
        return self._item_id() | {"content_index": 0}

    def _event(self, event: str, **fields: Any) -> None:
        self._events.append({"type": event, "output_index": len(self.items) - 1, **fields})


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _CallItem:
    """A call while its arguments arrive.

    Attributes:
        is_streamed: True if the item is sent at once, with events of its text. False: its fields
            need all arguments.
        field: Field of the item that holds the text.
        event: Prefix of the events of the text.
    """

    def __init__(self, call_id: str, name: str, offers: Offers, said: str = "") -> None:
        self._call_id = call_id
        # a tool that was not offered is a function, whose name the client rejects
        self._offered = offers.get(name) or Offered("function", name, "", {})
        form = self._offered.form
        self.is_streamed, self.field, self.event = bool(form.text), form.text, form.event
        self._said = [said] if said else []
        self._input = InputText() if self._offered.type == "custom" else None

    @property
    def text(self) -> str:
        """Text of the item so far."""
        return "".join(self._said) if self._input is None else self._input.text

    def begun(self) -> Item:
        """Return the item without text."""
        form, offered = self._offered.form, self._offered
        item: Item = {
            "id": new_id(form.prefix),
            "status": "in_progress",
            "type": form.call,
            "call_id": self._call_id,
            "name": offered.name,
            form.text: "",
        }
        return item | ({"namespace": offered.namespace} if offered.namespace else {})

    def push(self, arguments: str) -> str:
        """Return the new part of the text."""
        if self._input is not None:
            return self._input.push(arguments)
        self._said.append(arguments)
        return arguments if self.is_streamed else ""

    def finish(self) -> str:
        """Return the rest of the text."""
        return "" if self._input is None else self._input.finish()

    def whole(self, is_whole: bool) -> Item | None:
        """Return the item. None: the arguments do not fit its type."""
        called = object_of(self.text) if is_whole else None
        fields = None if called is None else self._offered.form.fields(called)
        if fields is None:
            return None
        form = self._offered.form
        return {"id": new_id(form.prefix), "type": form.call, "call_id": self._call_id, **fields}

    def as_function(self) -> "_CallItem":
        """Return the call as that of a function, whose arguments may be any text."""
        return _CallItem(self._call_id, self._offered.name, {}, self.text)
