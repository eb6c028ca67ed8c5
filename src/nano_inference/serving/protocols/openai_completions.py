"""`POST /v1/completions`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from nano_inference.serving.choices import Choice, Piece
from nano_inference.serving.errors import ApiError, bad_request
from nano_inference.serving.parsing import OutputParser
from nano_inference.serving.protocols.interface import Ask, Served, Usage
from nano_inference.types import SamplingParams


class Completions:
    """A first slice: prompt, max_tokens, temperature, ignore_eos, seed, n, stream."""

    def prepare(self, body: bytes, served: Served, request_id: str) -> "CompletionBuilder":
        try:
            given = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as problem:
            raise bad_request(f"the body is not JSON: {problem}") from None
        return CompletionBuilder(given, served, request_id)

    def error(self, problem: ApiError, request_id: str) -> Mapping[str, Any]:
        return {"error": {"message": problem.message, "type": "x", "param": problem.param, "code": problem.code}}


class CompletionBuilder:
    """One request."""

    make_parser: Callable[[], OutputParser] | None = None

    def __init__(self, given: dict[str, Any], served: Served, request_id: str) -> None:
        prompt = given["prompt"]
        if isinstance(prompt, str):
            assert served.tokenizer is not None
            prompt = served.tokenizer.encode(prompt, add_special_tokens=True)
        names = ("max_tokens", "temperature", "ignore_eos", "seed", "stop", "top_p")
        params = SamplingParams(**{name: given[name] for name in names if name in given})
        self.asks: Sequence[Ask] = [Ask(prompt, params, given.get("n", 1))]
        self.stream: bool = given.get("stream", False)
        self._base = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def start(self, usage: Usage) -> bytes:
        return b""

    def chunk(self, piece: Piece, usage: Usage) -> bytes:
        reason = None if piece.finished is None else piece.finished.finish_reason
        choice = {"index": piece.index, "text": piece.content, "logprobs": None, "finish_reason": reason}
        return b"data: %b\n\n" % msgspec.json.encode(self._base | {"choices": [choice]})

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return b"data: [DONE]\n\n"

    def failure(self, problem: ApiError) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode({"error": {"message": problem.message}})

    def response(self, choices: Sequence[Choice], usage: Usage) -> Mapping[str, Any]:
        return self._base | {
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.content,
                    "logprobs": None,
                    "finish_reason": choice.finished.finish_reason if choice.finished else None,
                }
                for choice in choices
            ],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
