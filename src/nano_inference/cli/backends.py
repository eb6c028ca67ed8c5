"""Who answers a chat: an engine in this process, or a server."""

from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from nano_inference.cli.options import request_body
from nano_inference.errors import InvalidRequest
from nano_inference.serving.http_client import HttpClient, Piece, ServerError, Usage
from nano_inference.types import SamplingParams

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine

Messages = list[dict[str, str]]


class ChatBackend(Protocol):
    """Answers conversations."""

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[Piece, None, None]:
        """Stream an answer of at most `params.max_tokens`, and of what still fits.

        Raises `InvalidRequest` where the conversation leaves no room for one.
        """
        ...


class EngineBackend:
    """Implements `ChatBackend` with an engine."""

    def __init__(self, engine: "InferenceEngine") -> None:
        self._engine = engine

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[Piece, None, None]:
        """Stream an answer, as the engine samples it."""
        from nano_inference.text.chat import encode_chat

        length = len(encode_chat(self._engine.tokenizer, messages))
        params = fitting(params, length, self._engine.max_model_len)
        for delta in self._engine.generate(messages, params, stream=True, progress=False):
            sample = delta.finished
            if sample is None:
                yield Piece(delta.text or "")
            else:
                usage = Usage(
                    len(sample.prompt_tokens), len(sample.completion_tokens), sample.cached_tokens
                )
                yield Piece(delta.text or "", finish_reason=sample.finish_reason, usage=usage)


class ServerBackend:
    """Implements `ChatBackend` over HTTP."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self._client, self._model = client, model

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[Piece, None, None]:
        """Stream an answer, as the server sends it."""
        given: dict[str, Any] = {"model": self._model, "messages": messages}
        counted: dict[str, Any] = {}
        # some servers cannot count; then they refuse what does not fit
        with suppress(InvalidRequest, ServerError):
            counted = self._client.post("/tokenize", given)
        if isinstance(counted.get("count"), int) and isinstance(counted.get("max_model_len"), int):
            params = fitting(params, counted["count"], counted["max_model_len"])
        yield from self._client.chat(given | request_body(params))


def fitting(params: SamplingParams, length: int, limit: int) -> SamplingParams:
    """The parameters, with no more tokens than still fit. Raises `InvalidRequest`."""
    if limit - length < 1:
        raise InvalidRequest(
            f"the conversation has {length} tokens, which leaves no room for an answer: the limit "
            f"is {limit}; /reset "
            "forgets it."
        )
    return replace(params, max_tokens=min(params.max_tokens, limit - length))
