"""`POST /api/chat` and `/api/generate`, for Ollama's clients.

Particularities of this server:

- A stream, which is the default, is a line of JSON per event. Errors in it are lines, too.
- `options` holds sampling parameters under Ollama's names, and the engine's own as extensions.
  Omitted ones have the values that the model recommends. `num_ctx` limits prompt and answer
  together, at most to the model's context. Prompts are never cut. Options about hardware have no
  effect.
- `format` is enforced by a grammar.
- `think` sets the template's `enable_thinking`. Its levels set `reasoning_effort`.
- Tool calls come together after the text.
- `keep_alive` sets how long the model stays loaded, if the server unloads models at all. An empty
  request with 0 unloads the model, any other empty request loads it.
- Images are rejected.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from nano_inference.server.api.ollama.models import (
    CHAT,
    ERROR,
    GENERATED,
    GenerateFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from nano_inference.server.api.ollama.request import (
    chat_prompt,
    demand_of,
    generate_prompt,
    keep_alive_of,
    params_of,
    served_name,
)
from nano_inference.server.api.shared.answers import arguments_object, at_least, encode_line
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta
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
from nano_inference.server.errors import ApiError
from nano_inference.types import TopLogprobs

NDJSON = "application/x-ndjson"


def line(value: object) -> bytes:
    """Return an event of a stream."""
    return encode_line(value) + b"\n"


def error_line(problem: ApiError) -> bytes:
    """Return the last event of a stream that failed."""
    return line({"error": problem.message})


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class OllamaBuilder(Builder):
    """Base of the builders of chats and completions.

    Args:
        request: Request, whose shared fields are checked here.
        served: Served model.
        prompt: Token ids. None: the request only loads its model.
    """

    media_type = NDJSON
    keeps_alive = False  # clients parse every line

    def __init__(
        self, request: GenerateFields, served: Served, prompt: list[int] | None, name: str
    ) -> None:
        self.request, self.served = request, served
        adapter_of(served_name(request.model), served)
        self.keep_alive = keep_alive_of(request.keep_alive)
        self.stream = prompt is not None and request.stream is not False
        self._began = time.perf_counter()
        self._first = self._began
        self.prompt = prompt
        if prompt is not None:
            behind = behind_reasoning(checked_prompt(prompt, served, name), served)
            self.asks: Sequence[Ask] = [Ask(prompt, params_of(request, prompt, served, behind))]

    # -- parts that differ -------------------------------------------------------------------------

    def said(self, content: str, thinking: str) -> dict[str, Any]:
        """Return the fields of new text."""
        raise NotImplementedError

    def called(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of all tool calls. Empty: there are none."""
        return {}

    def more(self, choice: Choice) -> dict[str, Any]:
        """Return additional fields of the last event."""
        return {}

    # ----------------------------------------------------------------------------------------------

    def start(self, usage: RequestUsage) -> bytes:
        """Note the time of the first tokens."""
        self._first = time.perf_counter()
        return b""

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """Return an event with new text."""
        logprobs = self._logprobs(piece)
        if not (piece.content or piece.reasoning or logprobs):
            return b""
        said = self.said(piece.content, piece.reasoning)
        return line(self._head() | said | {"done": False} | logprobs)

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """Return the tool calls, and the last event with all counts."""
        called = self.called(choices[0])
        calls = line(self._head() | called | {"done": False}) if called else b""
        return calls + line(self._head() | self.said("", "") | self._ended(choices[0], usage))

    def failure(self, problem: ApiError) -> bytes:
        """Return a line with the error."""
        return error_line(problem)

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Mapping[str, Any]:
        """Return the whole answer."""
        if not choices:
            return self._head() | self.said("", "") | {"done": True, "done_reason": "load"}
        choice = choices[0]
        said = self.said(choice.content, choice.reasoning) | self.called(choice)
        return self._head() | said | self._ended(choice, usage) | self._logprobs(choice.whole)

    def _head(self) -> dict[str, Any]:
        return {"model": self.request.model, "created_at": now()}

    def _ended(self, choice: Choice, usage: RequestUsage) -> dict[str, Any]:
        sample = choice.finished
        assert sample is not None
        end, load = time.perf_counter(), self.load_seconds
        first = self._first if self.stream else self._began
        return {
            "done": True,
            "done_reason": "length" if sample.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(end - self._began + load),
            "load_duration": _nanoseconds(load),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._began),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(end - first),
            **self.more(choice),
        }

    def _logprobs(self, piece: ChoiceDelta) -> dict[str, Any]:
        if not self.request.logprobs or not piece.token_ids:
            return {}
        tops = piece.top_logprobs or (TopLogprobs((), ()),) * len(piece.token_ids)
        return {
            "logprobs": [
                self._token(token_id, logprob)
                | {"top_logprobs": [*map(self._token, top.token_ids, top.logprobs)]}
                for token_id, logprob, top in zip(
                    piece.token_ids, piece.logprobs, tops, strict=True
                )
            ]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        texts = self.served.token_texts
        data = b"" if texts is None else texts.bytes_of(token_id)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": at_least(logprob), "bytes": list(data)}


def _nanoseconds(seconds: float) -> int:
    return int(max(0.0, seconds) * 1e9)


class ChatBuilder(OllamaBuilder):
    """One request of `/api/chat`."""

    def __init__(self, request: OllamaChatRequest, served: Served, request_id: str) -> None:
        prompt = chat_prompt(request, served) if request.messages else None
        super().__init__(request, served, prompt, "messages")
        if prompt is None:
            return
        demand = demand_of(request)
        self.asks = with_calls(self.asks, demand, served, goes_on=False)
        self.make_parser = parser_of(
            prompt,
            served,
            tools=None if demand is None else demand.schemas,
            format=call_format(demand, served),
        )

    def said(self, content: str, thinking: str) -> dict[str, Any]:
        """Return a message with new text."""
        thought = {"thinking": thinking} if thinking else {}
        return {"message": {"role": "assistant", "content": content, **thought}}

    def called(self, choice: Choice) -> dict[str, Any]:
        """Return a message with all tool calls."""
        calls = [
            {
                "id": call.id,
                "function": {
                    "index": index,
                    "name": call.name,
                    "arguments": arguments_object(call.arguments),
                },
            }
            for index, call in enumerate(choice.tool_calls)
        ]
        if not calls:
            return {}
        message = {} if self.stream else self.said(choice.content, choice.reasoning)["message"]
        message = message or self.said("", "")["message"]
        return {"message": message | {"tool_calls": calls}}


class GenerateBuilder(OllamaBuilder):
    """One request of `/api/generate`."""

    def __init__(self, request: OllamaGenerateRequest, served: Served, request_id: str) -> None:
        prompt = generate_prompt(request, served) if request.prompt else None
        super().__init__(request, served, prompt, "prompt")
        self._raw = bool(request.raw)
        if prompt is not None and not self._raw:
            self.make_parser = parser_of(prompt, served, tools=None)

    def said(self, content: str, thinking: str) -> dict[str, Any]:
        """Return new text."""
        return {"response": content} | ({"thinking": thinking} if thinking else {})

    def more(self, choice: Choice) -> dict[str, Any]:
        """Return the context, which a later prompt may continue."""
        if self._raw or choice.finished is None or self.prompt is None:
            return {}
        return {"context": [*self.prompt, *choice.finished.completion_tokens]}


class _Empty(msgspec.Struct):
    """Fields that show if a request only asks to unload its model."""

    model: Any = None
    keep_alive: Any = None
    messages: Any = None
    prompt: Any = None


_EMPTY = msgspec.json.Decoder(_Empty)


def _unloading(body: bytes, said: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if b"keep_alive" not in body:
        return None
    try:
        request = _EMPTY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # reported when the body is read
    if request.messages or request.prompt or keep_alive_of(request.keep_alive) != 0:
        return None
    head = {"model": request.model, "created_at": now()}
    return head | dict(said) | {"done": True, "done_reason": "unload"}


def chat_unloading(body: bytes) -> Mapping[str, Any] | None:
    """Return the reply to a chat that only unloads its model. None: it asks for more."""
    return _unloading(body, {"message": {"role": "assistant", "content": ""}})


def generate_unloading(body: bytes) -> Mapping[str, Any] | None:
    """Return the reply to a prompt that only unloads its model. None: it asks for more."""
    return _unloading(body, {"response": ""})


CHAT_PROTOCOL = ApiProtocol(
    OllamaChatRequest,
    ChatBuilder,
    operation(
        OllamaChatRequest,
        CHAT,
        summary="Create the next message of a chat (Ollama)",
        streams=True,
        error=ERROR,
    ),
    failure=error_line,
    keeps_alive=False,
    name=served_name,
    unloading=chat_unloading,
)
GENERATE_PROTOCOL = ApiProtocol(
    OllamaGenerateRequest,
    GenerateBuilder,
    operation(
        OllamaGenerateRequest,
        GENERATED,
        summary="Answer a prompt (Ollama)",
        streams=True,
        error=ERROR,
    ),
    failure=error_line,
    keeps_alive=False,
    name=served_name,
    unloading=generate_unloading,
)
