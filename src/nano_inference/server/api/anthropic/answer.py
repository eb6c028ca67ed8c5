"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients speak it.

What is particular to this server:

- `temperature`, `top_p`, `top_k`, `stop_sequences` are Anthropic's; the engine's other parameters
  are extensions under the engine's names. Those that return more than text (logprobs …) are
  refused: the OpenAI routes have them.
- `max_tokens` beyond the model's context is no error: the answer ends there, with
  `model_context_window_exceeded`.
- `thinking`: `enabled`, `adaptive` and `between_tools` ask the chat template to let the model think
  (`enable_thinking`), `disabled` or none ask it not to; a model that knows no such switch does as
  it always does. `budget_tokens` is not enforced. The model's thoughts are a thinking block, asked
  for or not.
- A last message of the assistant's is the beginning of the answer, and is not repeated in it. It
  may not end in white space.
- `chat_template_kwargs` is an extension: more names for the template.
- `tool_choice` `any` and `tool`, and tools that are `strict`, are enforced by a grammar.
  `disable_parallel_tool_use` leaves out all calls but the first. The result of a call with
  `is_error` is shown to the model after the word `Error:`.
- `document` blocks of text are what the user says, after their title and context; PDFs and
  citations are refused.
- `stop_reason` is `pause_turn` where the answer was cut off by an operation of the engine (new
  weights, say).
- `cache_control` with a `ttl`, wherever it stands, keeps the blocks of the whole request for so
  long after the answer; without one it says nothing new, as prefixes are cached anyway.
- Accepted without effect: `metadata`, `service_tier`,
  `output_config`'s `effort`, `context_management`, beta headers and the like.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from nano_inference.server.api.anthropic.models import ERROR, MESSAGE, CountRequest, MessagesRequest
from nano_inference.server.api.anthropic.request import demand_of, encode, goes_on, kept_seconds
from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.answers import encode_line
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
from nano_inference.server.errors import ApiError, anthropic_error, bad_request
from nano_inference.types import TrainingSample


def count_tokens(body: bytes, served: Served) -> dict[str, int]:
    """The answer of `/v1/messages/count_tokens`: tokens of the prompt, cached or not. Raises as
    `ApiProtocol.prepare`.
    """
    return {"input_tokens": len(encode(read_body(body, CountRequest, served.config), served))}


class MessageBuilder(Builder):
    """One request."""

    def __init__(self, request: MessagesRequest, served: Served, request_id: str) -> None:
        prompt, adapter = encode(request, served), adapter_of(request.model, served)
        room = served.engine.max_model_len - len(prompt)
        if room < 1:
            raise bad_request(  # these words tell Claude Code to shorten the conversation
                f"prompt is too long: {len(prompt)} tokens > {served.engine.max_model_len - 1} "
                "maximum",
                "messages",
                "context_length_exceeded",
            )
        checked_prompt(prompt, served, "messages")
        is_begun = goes_on(request)
        params = sampling_params(
            request,
            served,
            max_tokens=min(request.max_tokens, room),
            stop=checked_stop(request.stop_sequences, served, "stop_sequences"),
            defaults=served.sampling_defaults,
            renamed={"adapter": adapter, **hinted(kept_seconds(request), served)},
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
        tools = bool(request.tools) and not (choice is not None and choice.type == "none")
        self.make_parser = parser_of(
            prompt, served, tools=tools, format=call_format(demand, served)
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
        """`message_start`."""
        message = self._message | {"content": [], "stop_reason": None, "stop_sequence": None}
        return _events(
            [{"type": "message_start", "message": message | {"usage": self._usage(usage)}}]
        )

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """The events of blocks."""
        return _events(self._blocks.push(piece))

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """The last block's end, why it ended, and `message_stop`."""
        last = {
            "type": "message_delta",
            "delta": self._ended(choices[0]),
            "usage": self._usage(usage),
        }
        return _events([*self._blocks.end(), last, {"type": "message_stop"}])

    def failure(self, problem: ApiError) -> bytes:
        """An `error` event."""
        return b"event: error\ndata: %b\n\n" % encode_line(anthropic_error(problem))

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Mapping[str, Any]:
        """The message."""
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
        """Clients add the cached tokens to `input_tokens`, so they are not among them."""
        cached = 0 if self._hide_cached else usage.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


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


class BlockStream(Blocks):
    """Turns pieces into Anthropic's events.

    Args:
        omit_thinking: show that there was thinking, but not what.
        one_tool: leave out all calls but the first.
    """

    def __init__(self, *, omit_thinking: bool = False, one_tool: bool = False) -> None:
        super().__init__(one_call=one_tool)
        self._omit_thinking = omit_thinking
        self._index = -1  # of the last block
        self._thought: list[str] = []  # in the open block

    def opened(self, kind: Kind, call: ToolCallDelta | None) -> None:
        """`content_block_start`."""
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
        """`content_block_delta`."""
        if kind == "thinking":
            self._thought.append(text)
            if self._omit_thinking:
                return
        name, field = _DELTAS[kind]
        self._delta({"type": name, field: text})

    def closed(self, kind: Kind) -> None:
        """`content_block_stop`."""
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
        summary="The next message of a chat, as Anthropic has it",
        streams=True,
        error=ERROR,
    ),
)
