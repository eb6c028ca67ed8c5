"""`POST /v1/responses`, and the routes of stored responses.

Particularities of this server:

- The model sees every tool as a function (`responses_tools`). Tools that a server would have to run
  are rejected by name, as are images and files. The prompt is that of the same chat.
- Reasoning is answered in full: its items have `content` and no summary. Items that are sent back
  are passed to the chat template, by their signed `encrypted_content` if they have it.
- `include: ["message.output_text.logprobs"]` returns the logprobs of all tokens of the answer,
  including those of reasoning and calls, which are not in the text.
- Responses are stored in this process, up to `max_stored_responses` bytes. The least recently used
  ones are dropped first, and a restart drops all. `store: false` stores nothing. A response belongs
  to the API key of its request.
- `background: true` generates without the client, who polls, reads the events or cancels.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nano_inference.core.budget import Names
from nano_inference.server.api.openai.chat_answer import ChatBuilder
from nano_inference.server.api.openai.kept_responses import KeptResponse
from nano_inference.server.api.openai.responses_items import ItemStream, new_id
from nano_inference.server.api.openai.responses_models import (
    ENCRYPTED,
    RESPONSE,
    ChatMessage,
    Item,
    ResponsesRequest,
)
from nano_inference.server.api.openai.responses_request import (
    Reader,
    chat_request,
    check_include,
    items_of,
)
from nano_inference.server.api.openai.responses_tools import (
    Offers,
    forced_names,
    offered_tools,
    shown_tools,
)
from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta
from nano_inference.server.api.shared.detached import Detached
from nano_inference.server.api.shared.fields import read_body
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.api.shared.protocol import ApiProtocol, Builder, RequestUsage, Served
from nano_inference.server.errors import ApiError, bad_request, shown

CANCELLED = "response_cancelled"  # code of the error that cancels a response
_INSTRUCTING = ("system", "developer")
# field of a chat request -> field of a response request, for errors
_RENAMED: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class ResponseBuilder(Builder):
    """One request for a response, answered by a chat whose output is converted to items.

    Args:
        request: Body of the request.
        served: Served model.
        request_id: Id of the request.
        owner: Client that may read the response later.
    """

    names: ClassVar[Names] = {"max_tokens": "max_output_tokens"}

    def __init__(
        self, request: ResponsesRequest, served: Served, request_id: str, owner: str = ""
    ) -> None:
        self._served = served
        self._request, self._owner = request, owner
        check_include(request.include)
        self._reader = Reader(served.seal, owner)
        self._own = self._reader.messages(request.input)
        self._before: Sequence[ChatMessage] = ()
        offers = offered_tools(
            request.tools or (), items_of(request.input), forced_names(request.tool_choice)
        )
        if request.previous_response_id is not None:
            kept = self._continued(request.previous_response_id)
            self._before, offers = kept.messages, {**kept.late_tools, **offers}
        self._late = {name: tool for name, tool in offers.items() if tool.is_late}
        self._chat = self._fitting_chat(offers, request_id)
        self.asks = self._chat.asks
        self.make_parser = self._chat.make_parser
        self.shows_stream = bool(request.stream)
        self.stream = self.shows_stream or bool(request.background)
        self._head = _head(request, self._chat.head["model"], offers)
        self._items = ItemStream(
            offers,
            self._chat if self._chat.request.logprobs else None,
            self._sealed if ENCRYPTED in (request.include or ()) else None,
            one_call=request.parallel_tool_calls is False,
        )
        self._status = "queued" if request.background else "in_progress"
        if request.background:
            self.detached = self._detached()

    def _continued(self, name: str) -> KeptResponse:
        kept = self._served.responses.get(name, "previous_response_id", self._owner)
        if kept.is_running:
            raise bad_request(
                f"response {shown(name)} is still being generated; wait until it has ended.",
                "previous_response_id",
            )
        return kept

    def _fitting_chat(self, offers: Offers, request_id: str) -> ChatBuilder:
        """Return the chat. With `truncation: auto` it begins with the first turn from which the
        conversation fits into the context.
        """
        messages = [*self._before, *self._own]

        def chat(first: int) -> ChatBuilder:
            begun = [each for each in messages[:first] if each["role"] in _INSTRUCTING]
            try:
                converted = chat_request(self._request, [*begun, *messages[first:]], offers)
                return ChatBuilder(converted, self._served, request_id)
            except ApiError as problem:
                raise _renamed(problem) from None

        if self._request.truncation != "auto":
            return chat(0)
        turns = [index for index, each in enumerate(messages) if each["role"] == "user"]
        return _first_that_fits(chat, [0, *turns[1:]])

    def _sealed(self, thought: str) -> str:
        return self._served.seal.close(thought, self._owner)

    # -- in the background -------------------------------------------------------------------------

    def _detached(self) -> Detached:
        responses, name = self._served.responses, self._head["id"]
        if not self._head["store"] or not responses.most_bytes:
            remedy = (
                "omit store: false"
                if responses.most_bytes
                else "raise max_stored_responses above 0"
            )
            raise bad_request(f"background requires a stored response; {remedy}.", "background")
        return Detached(
            self.snapshot,
            keeps_events=self.shows_stream,
            grew=lambda num_bytes: responses.grow(name, num_bytes),
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the response so far."""
        output = list(map(dict, self._items.items))
        return self._head | {"status": self._status, "output": output, "usage": None}

    def queued(self) -> bytes:
        """Store the queued response, and return its events. Raises `ApiError` 429."""
        self._keep(self.snapshot(), ())
        kinds = ("response.created", "response.queued")
        return self._items.told({"type": kind, "response": self.snapshot()} for kind in kinds)

    # -- a stream ----------------------------------------------------------------------------------

    def start(self, usage: RequestUsage) -> bytes:
        """Return `response.created`, unless it was sent, and `response.in_progress`."""
        kinds = ["response.created", "response.in_progress"][self._status == "queued" :]
        self._status = "in_progress"
        return self._items.told({"type": kind, "response": self.snapshot()} for kind in kinds)

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
        """Return the `response.failed` event. A canceled response has its own status in it."""
        error = None
        if problem.code != CANCELLED:
            error = {"code": "server_error", "message": problem.message}
        self._status = "failed" if error else "cancelled"
        response = self.snapshot() | {"error": error}
        if self.detached is not None:
            self._keep(response, [*self._before, *self._own])
        return self._items.told([{"type": "response.failed", "response": response}])

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
        if whole:
            response["completed_at"] = int(time.time())
        self._status = response["status"]
        if self._head["store"]:
            said = self._reader.messages(output) if output else []
            self._keep(response, [*self._before, *self._own, *said])
        return response

    def _keep(self, response: Mapping[str, Any], messages: Sequence[ChatMessage]) -> None:
        items = [_listed(item) for item in items_of(self._request.input)]
        kept = KeptResponse(response, items, messages, self._owner, self.detached, self._late)
        self._served.responses.put(kept)

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


def _first_that_fits(chat: Callable[[int], ChatBuilder], firsts: Sequence[int]) -> ChatBuilder:
    """Return the longest chat that fits into the context. Later beginnings make shorter ones."""
    low, high, best, reason = 0, len(firsts) - 1, None, None
    while low <= high:
        # the whole conversation first: it usually fits
        middle = 0 if best is None and reason is None else (low + high) // 2
        try:
            best, high = chat(firsts[middle]), middle - 1
        except ApiError as problem:
            if problem.code != "context_length_exceeded":
                raise
            reason, low = problem, middle + 1
    if best is None:
        assert reason is not None
        raise reason
    return best


def _head(request: ResponsesRequest, model: str, offers: Offers) -> dict[str, Any]:
    """Return the fields that a response has from its first event on."""
    plain = request.model_dump(by_alias=True, exclude_none=True)
    reasoning, text = plain.get("reasoning", {}), plain.get("text", {})
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(request.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": request.tool_choice or "auto",
        "tools": shown_tools(request.tools or (), offers),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _listed(item: Item) -> Item:
    """Return an input's item in the form for `input_items`: with an id, and content in parts."""
    kind = item.get("type", "message")
    listed = {"id": new_id("item"), "status": "completed"} | item | {"type": kind}
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


@dataclass(frozen=True)
class ResponsesProtocol(ApiProtocol):
    """Protocol whose answers belong to the client that asks."""

    def prepare(self, body: bytes, served: Served, request_id: str, owner: str = "") -> Builder:
        """Read a request. Call it in a thread if the body is large."""
        request = read_body(body, ResponsesRequest, served.config)
        return ResponseBuilder(request, served, request_id, owner)


PROTOCOL = ResponsesProtocol(
    ResponsesRequest,
    ResponseBuilder,
    operation(ResponsesRequest, RESPONSE, summary="Create a model's response", streams=True),
)
