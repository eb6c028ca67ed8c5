"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients speak it.

What is particular to this server:

- `temperature`, `top_p`, `top_k`, `stop_sequences` are Anthropic's; the engine's other parameters are extensions under
  the engine's names. Those that return more than text (logprobs …) are refused: the OpenAI routes have them.
- `max_tokens` beyond the model's context is no error: the answer ends there, with `model_context_window_exceeded`.
- `thinking`: `enabled`, `adaptive` and `between_tools` ask the chat template to let the model think
  (`enable_thinking`), `disabled` or none ask it not to; a model that knows no such switch does as it always does.
  `budget_tokens` is not enforced. What the model thinks is a thinking block, asked for or not.
- A last message of the assistant's is the beginning of the answer, and is not repeated in it. It may not end in white
  space.
- `tool_choice` `any` and `tool` are refused: nothing can force a call yet. `disable_parallel_tool_use` leaves out all
  calls but the first. The result of a call with `is_error` is shown to the model after the word `Error:`.
- `stop_reason` is `pause_turn` where the answer was cut off by whoever runs the engine (new weights, say).
- Accepted without effect: `metadata`, `cache_control` (prefixes are cached anyway), `service_tier`, `output_config`'s
  `effort`, `context_management`, beta headers and the like.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from nano_inference.serving.choices import Choice, Piece
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.errors import ApiError, bad_request
from nano_inference.serving.parsing import OutputParser, make_parser
from nano_inference.serving.protocols.anthropic_blocks import BlockStream, Event, blocks_of
from nano_inference.serving.protocols.anthropic_prompt import encode
from nano_inference.serving.protocols.anthropic_schema import CountRequest, MessagesRequest
from nano_inference.serving.protocols.interface import Ask, Served, Usage
from nano_inference.types import SamplingParams, TrainingSample

_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Fields of other routes and of Anthropic's that change the answer and are not served here: refused unless null or off.
_REFUSED = {
    "stop": "use stop_sequences.",
    "n": "a message is one answer; send several requests.",
    "logprobs": "use /v1/chat/completions.",
    "top_logprobs": "use /v1/chat/completions.",
    "prompt_logprobs": "use /v1/chat/completions.",
    "raw_logprobs": "use /v1/chat/completions.",
    "sampling_mask": "use /v1/chat/completions.",
    "return_token_ids": "use /v1/chat/completions.",
    "response_format": "structured output does not exist yet.",
    "output_format": "structured output does not exist yet.",
    "mcp_servers": "call them from the client.",
    "container": "there are no containers here.",
}
_AS_THEY_ARE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "seed",
    "cache_salt",
    "priority",
)


class Messages:
    """The protocol."""

    def prepare(self, body: bytes, served: Served, request_id: str) -> "MessageBuilder":
        """Read a request. Raises `ApiError` and `InvalidRequest`."""
        given = _decoded(body)
        request = _validated(MessagesRequest, given, served)
        _check_limits(request, served.config)
        prompt = encode(request, served)
        return MessageBuilder(request, prompt, served, request_id)

    def error(self, problem: ApiError, request_id: str) -> Mapping[str, Any]:
        """The body of an answer that is an error."""
        kind = _ERROR_TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": problem.message}, "request_id": request_id}


def count_tokens(body: bytes, served: Served) -> dict[str, int]:
    """The answer of `/v1/messages/count_tokens`: tokens of the prompt, cached or not. Raises as `Messages.prepare`."""
    request = _validated(CountRequest, _decoded(body), served)
    return {"input_tokens": len(encode(request, served))}


class MessageBuilder:
    """One request. See `Builder`."""

    def __init__(self, request: MessagesRequest, prompt: list[int], served: Served, request_id: str) -> None:
        room = served.engine.max_model_len - len(prompt)
        if room < 1:
            raise bad_request(  # these words tell Claude Code to shorten the conversation
                f"prompt is too long: {len(prompt)} tokens > {served.engine.max_model_len - 1} maximum",
                "messages",
                "context_length_exceeded",
            )
        params = _sampling(request, min(request.max_tokens, room))
        self.asks: Sequence[Ask] = [Ask(prompt, params)]
        self.stream = bool(request.stream)
        self.make_parser: Callable[[], OutputParser] | None = _parser(request, prompt, served)
        self._clipped = request.max_tokens > room
        self._hide_cached = served.config.hide_cached_tokens
        choice, thinking = request.tool_choice, request.thinking
        self._options = {
            "omit_thinking": thinking is not None and thinking.display == "omitted",
            "one_tool": choice is not None and bool(choice.disable_parallel_tool_use),
        }
        self._blocks = BlockStream(**self._options)
        self._request_id = request_id
        self._message = {"id": f"msg_{uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": served.name}

    def start(self, usage: Usage) -> bytes:
        """`message_start`."""
        message = self._message | {"content": [], "stop_reason": None, "stop_sequence": None}
        return _events([{"type": "message_start", "message": message | {"usage": self._usage(usage)}}])

    def chunk(self, piece: Piece, usage: Usage) -> bytes:
        """The events of blocks."""
        return _events(self._blocks.push(piece))

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The last block's end, why it ended, and `message_stop`."""
        last = {"type": "message_delta", "delta": self._ended(choices[0]), "usage": self._usage(usage)}
        return _events([*self._blocks.finish(), last, {"type": "message_stop"}])

    def failure(self, problem: ApiError) -> bytes:
        """An `error` event."""
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(Messages().error(problem, self._request_id))

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
        [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events]
    )


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as problem:
        raise bad_request(f"the body is not a JSON object: {problem}") from None


_Request = TypeVar("_Request", bound=CountRequest)


def _validated(kind: type[_Request], given: dict[str, Any], served: Served) -> _Request:
    """What both routes ask of a body. Raises `ApiError`."""
    try:
        request = kind.model_validate(given)
    except ValidationError as problem:
        raise _bad_field(problem, given) from None
    if request.model != served.name:
        raise ApiError(404, f"model: there is no {request.model[:128]!r} here.", "model", "model_not_found")
    for name, advice in _REFUSED.items():
        value = given.get(name)
        if value and not (name == "n" and value == 1):
            raise bad_request(f"{name} is not supported: {advice}", name)
    output = given.get("output_config")
    if isinstance(output, dict) and output.get("format"):
        raise bad_request("output_config.format is not supported: structured output does not exist yet.")
    _at_most("messages", request.messages, served.config.max_messages)
    _at_most("tools", request.tools, served.config.max_tools)
    return request


def _bad_field(problem: ValidationError, given: object) -> ApiError:
    """The first thing that is wrong, with its place in the body."""
    first = problem.errors(include_url=False, include_input=False)[0]
    names: list[str] = []
    for step, name in enumerate(first["loc"]):
        inside = name in given if isinstance(given, dict) else isinstance(given, list)
        if inside or step == len(first["loc"]) - 1:  # others are pydantic's names for kinds of blocks
            names.append(str(name)[:64])
            given = given[name] if inside else None  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
    place = ".".join(names)
    return bad_request(f"{place}: {first['msg']}" if place else first["msg"], place or None)


def _at_most(name: str, values: Sequence[object] | Mapping[str, object] | None, most: int) -> None:
    if values is not None and len(values) > most:
        raise bad_request(f"{name}: {len(values)} are more than this server takes, which is {most}.", name)


def _check_limits(request: MessagesRequest, config: ServerConfig) -> None:
    _at_most("stop_sequences", request.stop_sequences, config.max_stop)
    for text in request.stop_sequences or ():
        if len(text) > config.max_stop_length:
            raise bad_request(
                f"stop_sequences: one of {len(text)} characters is longer than this server takes, which is "
                f"{config.max_stop_length}.",
                "stop_sequences",
            )
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        _at_most(name, getattr(request, name), config.max_logit_bias)


def _sampling(request: MessagesRequest, max_tokens: int) -> SamplingParams:
    """What the engine is to do. Raises `ApiError` and `InvalidRequest`."""
    given = {name: getattr(request, name) for name in _AS_THEY_ARE}
    return SamplingParams(
        max_tokens=max_tokens,
        stop=tuple(request.stop_sequences or ()),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        allowed_token_ids=None if request.allowed_token_ids is None else frozenset(request.allowed_token_ids),
        logit_bias=_bias(request.logit_bias or {}),
        **{name: value for name, value in given.items() if value is not None},
    )


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise bad_request(f"logit_bias: {name[:64]!r} is not a token id.", "logit_bias")
    return {int(name): value for name, value in given.items()}


def _parser(request: MessagesRequest, prompt: list[int], served: Served) -> Callable[[], OutputParser]:
    assert served.tokenizer is not None  # there is a prompt
    choice = request.tool_choice
    tools = bool(request.tools) and not (choice is not None and choice.type == "none")
    tail = served.tokenizer.decode(prompt[-64:], skip_special_tokens=False)
    return partial(make_parser, served.chat_format, tools=tools, reasoning=True, prompt_tail=tail)


class HasServed(Protocol):
    """Who knows what is served, once the engine is ready."""

    served: Served | None


def routes(server: HasServed) -> APIRouter:
    """`POST /v1/messages/count_tokens`. The engine is not asked."""
    router = APIRouter()

    @router.post("/v1/messages/count_tokens")
    async def count(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        assert server.served is not None
        answer = await asyncio.to_thread(count_tokens, await request.body(), server.served)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
