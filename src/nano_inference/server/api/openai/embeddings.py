"""`POST /v1/embeddings`: the policy's hidden state after the last token of each input, from which
the next token would be drawn. The embeddings are useful only if the model was trained for them.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from nano_inference.server.api.openai.models import Prompt
from nano_inference.server.api.shared.answers import LazyArray
from nano_inference.server.api.shared.fields import Strict, read_body
from nano_inference.server.api.shared.openapi import INTEGER, STRING, list_of, thing
from nano_inference.server.api.shared.prompts import (
    adapter_of,
    checked_prompt,
    need_tokenizer,
    prompt_list,
    require_at_most,
    require_possible_length,
)
from nano_inference.server.api.shared.protocol import Served

AT_ONCE = 8  # inputs per call of the engine; a request can end between two calls


class EmbeddingsRequest(Strict):
    """Body of `POST /v1/embeddings`."""

    input: Prompt
    model: Annotated[str, Field(max_length=1024)] | None = None
    encoding_format: Literal["float", "base64"] | None = Field(None, description="Default: float")
    ignored = ("user",)
    refused: ClassVar[dict[str, Sequence[Any]]] = {"dimensions": ()}


EMBEDDINGS = thing(
    *("object", "data", "model", "usage"),
    object={"const": "list"},
    data=list_of(
        thing("object", "index", "embedding", object={"const": "embedding"}, index=INTEGER)
    ),
    model=STRING,
    usage=thing("prompt_tokens", "total_tokens", prompt_tokens=INTEGER, total_tokens=INTEGER),
)


@dataclass(frozen=True)
class EmbeddingsAsked:
    """Parsed request for embeddings.

    Attributes:
        prompts: Token ids of each input.
        adapter: Adapter that computes the embeddings. None: the model without adapters.
        as_base64: True if embeddings are answered as base64.
    """

    prompts: list[list[int]]
    adapter: str | None
    as_base64: bool

    def portions(self) -> list[list[list[int]]]:
        """Return the prompts in groups, one per call of the engine."""
        starts = range(0, len(self.prompts), AT_ONCE)
        return [self.prompts[start : start + AT_ONCE] for start in starts]

    def answer(self, rows: Sequence[bytes], served: Served) -> dict[str, Any]:
        """Return the answer. `rows` are little-endian float32, one per prompt."""
        count = sum(map(len, self.prompts))
        return {
            "object": "list",
            "data": LazyArray(
                {"object": "embedding", "index": place, "embedding": self._told(row)}
                for place, row in enumerate(rows)
            ),
            "model": self.adapter or served.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    def _told(self, row: bytes) -> str | list[float]:
        if self.as_base64:
            return base64.b64encode(row).decode("ascii")
        return np.frombuffer(row, "<f4").tolist()


def read_embeddings(body: bytes, served: Served) -> EmbeddingsAsked:
    """Parse a request's body. Raises as `ApiProtocol.prepare` does."""
    request = read_body(body, EmbeddingsRequest, served.config)
    inputs = prompt_list(request.input, "input")
    require_at_most(len(inputs), served.config.max_samples, "input", "the number of inputs")
    adapter = adapter_of(request.model, served)
    prompts = [_token_ids(each, served) for each in inputs]
    return EmbeddingsAsked(prompts, adapter, request.encoding_format == "base64")


def _token_ids(prompt: str | list[int], served: Served) -> list[int]:
    if isinstance(prompt, str):
        require_possible_length(prompt, served, "input")
        prompt = need_tokenizer(served).encode(prompt, add_special_tokens=True)
    return checked_prompt(prompt, served, "input", least=0)
