"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients speak it.

What is particular to this server:

- `temperature`, `top_p`, `top_k`, `stop_sequences` are Anthropic's; the engine's other parameters
  are extensions under the engine's names. Those that return more than text (logprobs …) are
  refused: the OpenAI routes have them.
- `max_tokens` beyond the model's context is no error: the answer ends there, with
  `model_context_window_exceeded`.
- `thinking`: `enabled`, `adaptive` and `between_tools` ask the chat template to let the model think
  (`enable_thinking`), `disabled` or none ask it not to; a model that knows no such switch does as
  it always does. `budget_tokens` is not enforced. What the model thinks is a thinking block, asked
  for or not.
- A last message of the assistant's is the beginning of the answer, and is not repeated in it. It
  may not end in white space.
- `chat_template_kwargs` is an extension: more names for the template.
- `tool_choice` `any` and `tool` are refused: nothing can force a call yet.
  `disable_parallel_tool_use` leaves out all calls but the first. The result of a call with
  `is_error` is shown to the model after the word `Error:`.
- `document` blocks of text are what the user says, after their title and context; PDFs and
  citations are refused.
- `stop_reason` is `pause_turn` where the answer was cut off by whoever runs the engine (new
  weights, say).
- Accepted without effect: `metadata`, `cache_control` (prefixes are cached anyway), `service_tier`,
  `output_config`'s `effort`, `context_management`, beta headers and the like.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from nano_inference.budget import Names
from nano_inference.serving.choices import Choice, Piece
from nano_inference.serving.edge.exchange import read_request
from nano_inference.serving.edge.replies import json_reply
from nano_inference.serving.errors import ApiError, anthropic_error, bad_request
from nano_inference.serving.protocols import chats
from nano_inference.serving.protocols.anthropic_blocks import BlockStream, Event, blocks_of
from nano_inference.serving.protocols.anthropic_prompt import encode
from nano_inference.serving.protocols.anthropic_schema import (
    COUNT,
    ERROR,
    MESSAGE,
    CountRequest,
    MessagesRequest,
)
from nano_inference.serving.protocols.fields import (
    UNSUPPORTED,
    checked_prompt,
    checked_stop,
    require_at_most,
    require_model,
    sampling_params,
)
from nano_inference.serving.protocols.interface import Ask, Served, Usage
from nano_inference.serving.protocols.lines import encode_line
from nano_inference.serving.protocols.openapi import operation
from nano_inference.serving.protocols.reading import read_body
from nano_inference.serving.server import Server
from nano_inference.types import TrainingSample

_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    **UNSUPPORTED,
    **chats.UNSUPPORTED,
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
_Request = TypeVar("_Request", bound=CountRequest)


class Messages:
    """The protocol."""

    openapi: Mapping[str, Any] = operation(
        MessagesRequest,
        MESSAGE,
        summary="The next message of a chat, as Anthropic has it",
        streams=True,
        error=ERROR,
    )

    def prepare(self, body: bytes, served: Served, request_id: str) -> "MessageBuilder":
        """Read a request. Raises `ApiError` and `InvalidRequest`."""
        request = _read(body, MessagesRequest, served)
        return MessageBuilder(request, encode(request, served), served, request_id)


def count_tokens(body: bytes, served: Served) -> dict[str, int]:
    """The answer of `/v1/messages/count_tokens`: tokens of the prompt, cached or not. Raises as
    `Messages.prepare`.
    """
    request = _read(body, CountRequest, served)
    return {"input_tokens": len(encode(request, served))}


class MessageBuilder:
    """One request. See `Builder`."""

    names: Names = {}  # noqa: RUF012 - as `Builder` has it

    def __init__(
        self, request: MessagesRequest, prompt: list[int], served: Served, request_id: str
    ) -> None:
        room = served.engine.max_model_len - len(prompt)
        if room < 1:
            raise bad_request(  # these words tell Claude Code to shorten the conversation
                f"prompt is too long: {len(prompt)} tokens > {served.engine.max_model_len - 1} "
                "maximum",
                "messages",
                "context_length_exceeded",
            )
        checked_prompt(prompt, served, "messages")
        params = sampling_params(
            request,
            served,
            max_tokens=min(request.max_tokens, room),
            stop=checked_stop(request.stop_sequences, served, "stop_sequences"),
            defaults=served.sampling_defaults,
            **({} if request.temperature is None else {"temperature": request.temperature}),
        )
        self.asks: Sequence[Ask] = [Ask(prompt, params)]
        self.stream = bool(request.stream)
        self._clipped = request.max_tokens > room
        self._hide_cached = served.config.hide_cached_tokens
        choice, thinking = request.tool_choice, request.thinking
        tools = bool(request.tools) and not (choice is not None and choice.type == "none")
        self.make_parser = chats.parser_of(prompt, served, tools=tools)
        self._options = {
            "omit_thinking": thinking is not None and thinking.display == "omitted",
            "one_tool": choice is not None and bool(choice.disable_parallel_tool_use),
        }
        self._blocks = BlockStream(**self._options)
        self._message = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": served.name,
        }

    def start(self, usage: Usage) -> bytes:
        """`message_start`."""
        message = self._message | {"content": [], "stop_reason": None, "stop_sequence": None}
        return _events(
            [{"type": "message_start", "message": message | {"usage": self._usage(usage)}}]
        )

    def chunk(self, piece: Piece, usage: Usage) -> bytes:
        """The events of blocks."""
        return _events(self._blocks.push(piece))

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The last block's end, why it ended, and `message_stop`."""
        last = {
            "type": "message_delta",
            "delta": self._ended(choices[0]),
            "usage": self._usage(usage),
        }
        return _events([*self._blocks.finish(), last, {"type": "message_stop"}])

    def failure(self, problem: ApiError) -> bytes:
        """An `error` event."""
        return b"event: error\ndata: %b\n\n" % encode_line(anthropic_error(problem))

    def response(self, choices: Sequence[Choice], usage: Usage) -> Mapping[str, Any]:
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

    def _usage(self, usage: Usage) -> dict[str, int]:
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


def _read(body: bytes, kind: type[_Request], served: Served) -> _Request:
    """What both routes ask of a body. Raises `ApiError`."""
    request = read_body(body, kind, served.config, _UNSUPPORTED)
    require_model(request.model, served)
    if not request.messages:
        raise bad_request("messages is empty; give at least one.", "messages")
    require_at_most(
        len(request.messages), served.config.max_messages, "messages", "the number of messages"
    )
    return request


def routes(server: Server) -> APIRouter:
    """`POST /v1/messages/count_tokens`. The engine is not asked."""
    router = APIRouter()

    async def count(request: Request) -> Response:
        return json_reply(200, await read_request(request, server, count_tokens))

    described = operation(CountRequest, COUNT, summary="How many tokens a prompt has", error=ERROR)
    router.add_api_route(
        "/v1/messages/count_tokens", count, methods=["POST"], openapi_extra=described
    )
    return router
