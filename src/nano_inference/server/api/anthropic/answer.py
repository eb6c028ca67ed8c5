"""`POST /v1/messages` and `/v1/messages/count_tokens`, for Anthropic's clients.

Particularities of this server:

- `temperature`, `top_p`, `top_k` and `stop_sequences` are Anthropic's. The engine's other
  parameters are extensions under the engine's names. Parameters that return more than text
  (logprobs …) are rejected, since the OpenAI routes have them.
- `max_tokens` may exceed the model's context. The answer then ends at the context's end, with
  `model_context_window_exceeded`.
- `thinking`: `enabled`, `adaptive` and `between_tools` ask the chat template to let the model think
  (`enable_thinking`). `disabled` or none asks it not to. A template without this switch ignores
  both. The reasoning is closed after `budget_tokens`, or earlier so that an answer fits into
  `max_tokens`. Reasoning is always answered as a thinking block.
- If the last message is the assistant's, it is the beginning of the answer, which does not repeat
  it. Such a message must not end in whitespace.
- `chat_template_kwargs` is an extension: more variables for the template.
- `tool_choice` `any` and `tool`, and tools that are `strict`, are enforced by a grammar.
  `disable_parallel_tool_use` omits all calls but the first. The model sees the result of a call
  with `is_error` after the word `Error:`.
- `document` blocks of text become user text, after their title and context. PDFs and citations are
  rejected.
- `stop_reason` is `pause_turn` if an operation of the engine, such as a weight update, cut the
  answer off.
- `cache_control` with a `ttl`, anywhere in the request, keeps the blocks of the whole request for
  that time after the answer. Without a `ttl` it has no effect, because prefixes are always cached.
- Accepted without effect: `metadata`, `service_tier`, `effort` of `output_config`,
  `context_management`, beta headers and the like.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nano_inference.server.api.anthropic.models import ERROR, MESSAGE, CountRequest, MessagesRequest
from nano_inference.server.api.anthropic.request import (
    demand_of,
    encode,
    goes_on,
    kept_seconds,
    thinks,
)
from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.answers import arguments_object, encode_line
from nano_inference.server.api.shared.blocks import Blocks, Event, Kind
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta
from nano_inference.server.api.shared.fields import read_body
from nano_inference.server.api.shared.grammars import call_format, with_calls
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.api.shared.prompts import (
    adapter_of,
    behind_reasoning,
    checked_prompt,
    parser_of,
)
from nano_inference.server.api.shared.protocol import (
    ApiProtocol,
    Ask,
    Builder,
    RequestUsage,
    Served,
)
from nano_inference.server.api.shared.sampling import checked_stop, hinted, sampling_params
from nano_inference.server.api.shared.thoughts import fitting_budget
from nano_inference.server.errors import ApiError, anthropic_error, bad_request
from nano_inference.types import TrainingSample


def count_tokens(body: bytes, served: Served) -> dict[str, int]:
    """Return the answer of `/v1/messages/count_tokens`: the number of prompt tokens, cached or not.
    Raises as `ApiProtocol.prepare` does.
    """
    return {"input_tokens": len(encode(read_body(body, CountRequest, served.config), served))}


class MessageBuilder(Builder):
    """One request of the Messages API."""

    def __init__(self, request: MessagesRequest, served: Served, request_id: str) -> None:
        prompt, adapter = encode(request, served), adapter_of(request.model, served)
        room = served.engine.max_model_len - len(prompt)
        if room < 1:
            raise bad_request(  # Claude Code looks for this wording to shorten the conversation
                f"prompt is too long: {len(prompt)} tokens > {served.engine.max_model_len - 1} "
                "maximum",
                "messages",
                "context_length_exceeded",
            )
        checked_prompt(prompt, served, "messages")
        is_begun, most = goes_on(request), min(request.max_tokens, room)
        asked = request.thinking.budget_tokens if request.thinking and thinks(request) else None
        params = sampling_params(
            request,
            served,
            max_tokens=most,
            stop=checked_stop(request.stop_sequences, served, "stop_sequences"),
            defaults=served.sampling_defaults,
            renamed={
                "adapter": adapter,
                **hinted(kept_seconds(request), served),
                "thinking_budget": fitting_budget(asked, most, served),
            },
            behind=behind_reasoning(prompt, served, goes_on=is_begun),
        )
        demand = demand_of(request)
        self.asks: Sequence[Ask] = with_calls(
            [Ask(prompt, params)], demand, served, goes_on=is_begun
        )
        self.stream = bool(request.stream)
        self._clipped = request.max_tokens > room
        self._hide_cached = served.config.hide_cached_tokens
        choice, thinking = request.tool_choice, request.thinking
        self.make_parser = parser_of(
            prompt,
            served,
            tools=None if demand is None else demand.schemas,
            format=call_format(demand, served),
        )
        self._options = {
            "omit_thinking": thinking is not None and thinking.display == "omitted",
            "one_tool": choice is not None and bool(choice.disable_parallel_tool_use),
        }
        self._blocks = BlockStream(**self._options)
        self._message = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": adapter or served.name,
        }

    def start(self, usage: RequestUsage) -> bytes:
        """Return the `message_start` event."""
        message = self._message | {"content": [], "stop_reason": None, "stop_sequence": None}
        return _events(
            [{"type": "message_start", "message": message | {"usage": self._usage(usage)}}]
        )

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """Return the events of content blocks."""
        return _events(self._blocks.push(piece))

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """Return the end of the last block, the stop reason, and `message_stop`."""
        last = {
            "type": "message_delta",
            "delta": self._ended(choices[0]),
            "usage": self._usage(usage),
        }
        return _events([*self._blocks.end(), last, {"type": "message_stop"}])

    def failure(self, problem: ApiError) -> bytes:
        """Return an `error` event."""
        return error_event(problem)

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Mapping[str, Any]:
        """Return the whole message."""
        choice = choices[0]
        content = {"content": blocks_of(choice, **self._options)}
        return self._message | content | self._ended(choice) | {"usage": self._usage(usage)}

    def _ended(self, choice: Choice) -> dict[str, Any]:
        assert choice.finished is not None
        reason = self._stop_reason(choice.finished, bool(choice.tool_calls))
        matched = choice.finished.stop_reason if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": matched}

    def _stop_reason(self, sample: TrainingSample, calls: bool) -> str:
        if sample.finish_reason == "length":
            return "model_context_window_exceeded" if self._clipped else "max_tokens"
        if sample.finish_reason == "abort":
            return "pause_turn"
        if isinstance(sample.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if calls else "end_turn"

    def _usage(self, usage: RequestUsage) -> dict[str, int]:
        """Return the usage. `input_tokens` excludes cached tokens, because clients add these."""
        cached = 0 if self._hide_cached else usage.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


def error_event(problem: ApiError) -> bytes:
    """Return an `error` event."""
    return b"event: error\ndata: %b\n\n" % encode_line(anthropic_error(problem))


def _events(events: Iterable[Event]) -> bytes:
    return b"".join(
        [
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_line(event))
            for event in events
        ]
    )


_EMPTY: Mapping[Kind, Event] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_DELTAS: Mapping[Kind, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def signature(thinking: str) -> str:
    """Return the signature of a thinking block, a digest of its text. The server does not check it,
    but clients require one.
    """
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def tool_use_id(call_id: str) -> str:
    """Return a tool call's id in Anthropic's form."""
    return "toolu_" + call_id.removeprefix("call_")


def blocks_of(
    choice: Choice, *, omit_thinking: bool = False, one_tool: bool = False
) -> list[dict[str, Any]]:
    """Return the content blocks of a finished choice. The arguments are those of `BlockStream`."""
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
        arguments = arguments_object(call.arguments)
        blocks.append(
            {
                "type": "tool_use",
                "id": tool_use_id(call.id),
                "name": call.name,
                "input": arguments,
            }
        )
    return blocks


class BlockStream(Blocks):
    """Converter of pieces to Anthropic's events.

    Args:
        omit_thinking: Report thinking blocks without their text.
        one_tool: Omit all calls but the first.
    """

    def __init__(self, *, omit_thinking: bool = False, one_tool: bool = False) -> None:
        super().__init__(one_call=one_tool)
        self._omit_thinking = omit_thinking
        self._index = -1  # index of the last block
        self._thought: list[str] = []  # text of the open thinking block

    def opened(self, kind: Kind, call: ToolCallDelta | None) -> None:
        """Append a `content_block_start` event."""
        block = _EMPTY.get(kind)
        if call is not None:
            assert call.id is not None
            block = {
                "type": "tool_use",
                "id": tool_use_id(call.id),
                "name": call.name or "",
                "input": {},
            }
        self._index += 1
        self._events.append(
            {"type": "content_block_start", "index": self._index, "content_block": block}
        )

    def said(self, kind: Kind, text: str) -> None:
        """Append a `content_block_delta` event."""
        if kind == "thinking":
            self._thought.append(text)
            if self._omit_thinking:
                return
        name, field = _DELTAS[kind]
        self._delta({"type": name, field: text})

    def closed(self, kind: Kind) -> None:
        """Append `content_block_stop`, after the signature of a thinking block."""
        if kind == "thinking":
            vouched = signature("".join(self._thought))
            self._delta({"type": "signature_delta", "signature": vouched})
            self._thought = []
        self._events.append({"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: Event) -> None:
        self._events.append({"type": "content_block_delta", "index": self._index, "delta": delta})


PROTOCOL = ApiProtocol(
    MessagesRequest,
    MessageBuilder,
    operation(
        MessagesRequest,
        MESSAGE,
        summary="Create the next message of a chat (Anthropic)",
        streams=True,
        error=ERROR,
    ),
    failure=error_event,
)
