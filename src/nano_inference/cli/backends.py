"""Who answers a chat: an engine in this process, or a server."""

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from nano_inference.cli.options import request_body
from nano_inference.errors import InvalidRequest
from nano_inference.serving.http_client import HttpClient, ServerError
from nano_inference.types import SamplingParams

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Said:
    """A part of an answer; numbers of tokens are known at its end."""

    text: str = ""
    reasoning: str = ""
    is_cut: bool = False
    tokens: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


class ChatBackend(Protocol):
    """Answers conversations."""

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[Said, None, None]:
        """Stream an answer of at most `params.max_tokens`, and of what still fits.

        Raises `InvalidRequest` where the conversation leaves no room for one.
        """
        ...


class EngineBackend:
    """Implements `ChatBackend` with an engine."""

    def __init__(self, engine: "InferenceEngine") -> None:
        self._engine = engine

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[Said, None, None]:
        """Stream an answer, as the engine samples it."""
        from nano_inference.text.chat import encode_chat

        length = len(encode_chat(self._engine.tokenizer, messages))
        params = fitting(params, length, self._engine.max_model_len)
        for delta in self._engine.generate(messages, params, stream=True, progress=False):
            sample = delta.finished
            if sample is None:
                yield Said(delta.text or "")
            else:
                counts = len(sample.completion_tokens), len(sample.prompt_tokens), sample.cached_tokens
                yield Said(delta.text or "", "", sample.finish_reason == "length", *counts)


class ServerBackend:
    """Implements `ChatBackend` over HTTP."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self._client, self._model = client, model

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[Said, None, None]:
        """Stream an answer, as the server sends it."""
        given: dict[str, Any] = {"model": self._model, "messages": messages}
        counted: dict[str, Any] = {}
        with suppress(InvalidRequest, ServerError):  # some servers cannot count; then they refuse what does not fit
            counted = self._client.post("/tokenize", given)
        if isinstance(counted.get("count"), int) and isinstance(counted.get("max_model_len"), int):
            params = fitting(params, counted["count"], counted["max_model_len"])
        is_cut = False
        for piece in self._client.chat(given | request_body(params)):
            is_cut = is_cut or piece.finish_reason == "length"
            usage = piece.usage
            if usage is None:
                yield Said(piece.text, piece.reasoning)
            else:
                counts = usage.completion_tokens, usage.prompt_tokens, usage.cached_tokens
                yield Said(piece.text, piece.reasoning, is_cut, *counts)


def fitting(params: SamplingParams, length: int, limit: int) -> SamplingParams:
    """The parameters, with no more tokens than still fit. Raises `InvalidRequest`."""
    if limit - length < 1:
        raise InvalidRequest(
            f"the conversation has {length} tokens, which leaves no room for an answer: the limit is {limit}; /reset "
            "forgets it."
        )
    return replace(params, max_tokens=min(params.max_tokens, limit - length))
