"""`POST /v1/responses`, and the routes of stored responses.

Particularities of this server:

- An input holds texts, function calls, their outputs and reasoning. Images, files and OpenAI's own
  tools are rejected by name. The prompt is that of the same chat.
- Reasoning is answered in full: its items have `content` and no summary. Items that are sent back
  are passed to the chat template.
- `include: ["message.output_text.logprobs"]` returns the logprobs of all tokens of the answer,
  including those of reasoning and calls, which are not in the text.
- Responses are stored in this process, up to `max_stored_responses` bytes. The least recently used
  ones are dropped first, and a restart drops all. `store: false` stores nothing.
"""

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from pydantic_core import from_json

from nano_inference.core.budget import Names
from nano_inference.server.api.openai.chat_answer import ChatBuilder
from nano_inference.server.api.openai.kept_responses import KeptResponse
from nano_inference.server.api.openai.responses_models import (
    RESPONSE,
    ChatMessage,
    Item,
    ResponsesRequest,
)
from nano_inference.server.api.openai.responses_request import (
    chat_request,
    items_of,
    joined,
    messages_of,
)
from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.answers import encode_line
from nano_inference.server.api.shared.blocks import Blocks, Event, Kind
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.api.shared.protocol import ApiProtocol, Builder, RequestUsage, Served
from nano_inference.server.errors import ApiError

# field of a chat request -> field of a response request, for errors
_RENAMED: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class ResponseBuilder(Builder):
    """One request for a response, answered by a chat whose output is converted to items."""

    names: ClassVar[Names] = {"max_tokens": "max_output_tokens"}

    def __init__(self, request: ResponsesRequest, served: Served, request_id: str) -> None:
        self._served = served
        self._own = messages_of(request.input)
        self._before: Sequence[ChatMessage] = ()
        if (name := request.previous_response_id) is not None:
            self._before = served.responses.get(name, "previous_response_id").messages
        try:
            self._chat = ChatBuilder(chat_request(request, self._before), served, request_id)
        except ApiError as problem:
            raise _renamed(problem) from None
        self.asks = self._chat.asks
        self.make_parser = self._chat.make_parser
        self.stream = bool(request.stream)
        self._request = request
        self._head = _head(request, self._chat.head["model"])
        one_call = request.parallel_tool_calls is False
        self._items = ItemStream(self._chat if self._chat.request.logprobs else None, one_call)

    # -- a stream ----------------------------------------------------------------------------------

    def start(self, usage: RequestUsage) -> bytes:
        """Return `response.created` and `response.in_progress`."""
        begun = self._head | {"status": "in_progress", "output": [], "usage": None}
        kinds = ("response.created", "response.in_progress")
        return self._items.told({"type": kind, "response": begun} for kind in kinds)

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """Return the events of output items."""
        return self._items.told(self._items.push(piece))

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """Return the end of the last item, and the whole response."""
        last = self._items.ended(choices[0])
        response = self._finished(choices[0], usage)
        kind = f"response.{response['status']}"
        return self._items.told([*last, {"type": kind, "response": response}])

    def failure(self, problem: ApiError) -> bytes:
        """Return the `response.failed` event."""
        error = {"code": "server_error", "message": problem.message}
        failed = {"status": "failed", "error": error, "output": self._items.items, "usage": None}
        return self._items.told([{"type": "response.failed", "response": self._head | failed}])

    # -- the answer as a whole ---------------------------------------------------------------------

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Mapping[str, Any]:
        """Return the whole response."""
        choice = choices[0]
        self._items.push(
            ChoiceDelta(
                0,
                choice.content,
                choice.reasoning,
                tuple(
                    ToolCallDelta(number, call.id, call.name, call.arguments)
                    for number, call in enumerate(choice.tool_calls)
                ),
            )
        )
        self._items.ended(choice)
        return self._finished(choice, usage)

    def _finished(self, choice: Choice, usage: RequestUsage) -> dict[str, Any]:
        sample = choice.finished
        assert sample is not None
        whole = sample.finish_reason == "stop"
        reason = "max_output_tokens" if sample.finish_reason == "length" else "content_filter"
        output = self._items.items
        response = self._head | {
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": reason},
            "output": output,
            "usage": self._usage(usage, choice),
        }
        if self._head["store"]:
            said = joined(messages_of(list(map(_sent_back, output)))) if output else []
            items = [_listed(item) for item in items_of(self._request.input)]
            kept = KeptResponse(response, items, [*self._before, *self._own, *said])
            self._served.responses.put(kept)
        return response

    def _usage(self, usage: RequestUsage, choice: Choice) -> dict[str, Any]:
        counts = self._chat.usage_of(usage, [choice])
        details = counts.get("completion_tokens_details", {"reasoning_tokens": 0})
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}
            | counts.get("prompt_tokens_details", {}),
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": details,
            "total_tokens": counts["total_tokens"],
        }


def _head(request: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the fields that a response has from its first event on."""
    plain = request.model_dump(by_alias=True, exclude_none=True)
    reasoning = plain.get("reasoning", {})
    return {
        "id": f"resp_{secrets.token_hex(24)}",  # secret: its id is enough to read a response
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": plain.get("text", {}).get("format", {"type": "text"})},
        "tool_choice": request.tool_choice or "auto",
        "tools": plain.get("tools", []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": None,
    }


def _sent_back(item: Item) -> Item:
    """Return an item of an answer as an item of an input. The arguments of a call that was cut off
    are completed to valid JSON.
    """
    if item["type"] != "function_call":
        return item
    text, arguments = item["arguments"], "{}"
    with suppress(ValueError):
        partial = from_json(text, allow_partial=True)
        arguments = text if _is_json(text) else json.dumps(partial)
    return item | {"arguments": arguments}


def _is_json(text: str) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def _listed(item: Item) -> Item:
    """Return an input's item in the form for `input_items`: with an id, and content in parts."""
    kind = item.get("type", "message")
    listed = {"id": f"item_{secrets.token_hex(24)}", "status": "completed"} | item | {"type": kind}
    if isinstance(text := item.get("content"), str):
        is_output = item["role"] == "assistant"
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        listed["content"] = [part if is_output else {"type": "input_text", "text": text}]
    return listed


def _renamed(problem: ApiError) -> ApiError:
    """Replace a chat's field names in an error by those of a response."""
    name, message = problem.param or "", problem.message
    for theirs, ours in _RENAMED.items():
        if name == theirs or name.startswith(f"{theirs}."):
            renamed = ours + name.removeprefix(theirs)
            return ApiError(
                problem.status,
                message.replace(theirs, ours),
                renamed,
                problem.code,
                headers=problem.headers,
            )
    return problem


_PREFIX: Mapping[Kind, str] = {"thinking": "rs", "text": "msg", "call": "fc"}
# kind -> prefix of its text's events
_TEXT: Mapping[Kind, str] = {
    "thinking": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class ItemStream(Blocks):
    """Converter of pieces to events of output items, which also collects the items.

    Args:
        logprobs: Builder that makes rows of logprobs. None: the client did not ask for them.
        one_call: Omit all calls but the first.
    """

    def __init__(self, logprobs: ChatBuilder | None, one_call: bool) -> None:
        super().__init__(one_call=one_call)
        self._logprobs = logprobs
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
        item: Item = {"id": f"{_PREFIX[kind]}_{secrets.token_hex(24)}", "status": "in_progress"}
        if kind == "thinking":
            item |= {"type": "reasoning", "summary": [], "content": []}
        elif kind == "text":
            item |= {"type": "message", "role": "assistant", "content": []}
        else:
            assert call is not None
            called = {"call_id": call.id, "name": call.name or "", "arguments": ""}
            item |= {"type": "function_call", **called}
        self._said, self._scored = [], []
        self.items.append(item)
        self._event("response.output_item.added", item=dict(item))
        if kind != "call":
            self._part("response.content_part.added", kind, "")

    def said(self, kind: Kind, text: str) -> None:
        """Append an event with more of the item's text, or of a call's arguments."""
        self._said.append(text)
        self._event(f"{_TEXT[kind]}.delta", **self._where(kind), delta=text, **self._scores(kind))

    def broke(self) -> None:
        """Mark the open call as broken, so that clients do not run it."""
        self._broke = True

    def closed(self, kind: Kind) -> None:
        """Append the ends of text, part and item."""
        text, item = "".join(self._said), self.items[-1]
        name = "arguments" if kind == "call" else "text"
        more = {"name": item["name"]} if kind == "call" else {}
        if kind == "text":
            more = {"logprobs": self._scored}
        self._event(f"{_TEXT[kind]}.done", **self._where(kind), **{name: text}, **more)
        # held text follows the call, which is therefore complete
        is_last = kind != "call" or not any(self._held.values())
        is_whole = not self._broke and not (self._is_cut and is_last)
        item["status"], self._broke = "completed" if is_whole else "incomplete", False
        if kind == "call":
            item["arguments"] = text
        else:
            item["content"] = [_part(kind, text)]
            self._part("response.content_part.done", kind, text)
        self._event("response.output_item.done", item=dict(item))

    def _scores(self, kind: Kind) -> dict[str, Any]:
        if kind != "text":
            return {}
        new, self._new = self._new, []
        self._scored += new
        return {"logprobs": new}

    def _part(self, name: str, kind: Kind, text: str) -> None:
        self._event(name, **self._where(kind), part=_part(kind, text))

    def _where(self, kind: Kind) -> dict[str, Any]:
        fields: dict[str, Any] = {"item_id": self.items[-1]["id"]}
        return fields if kind == "call" else fields | {"content_index": 0}

    def _event(self, event: str, **fields: Any) -> None:
        self._events.append({"type": event, "output_index": len(self.items) - 1, **fields})


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


PROTOCOL = ApiProtocol(
    ResponsesRequest,
    ResponseBuilder,
    operation(ResponsesRequest, RESPONSE, summary="Create a model's response", streams=True),
)
