"""`POST /v1/embeddings`: the policy's hidden state behind the last token of each input, which is
what its next token would be drawn from. A model that was trained for embeddings this way serves
them; of another one they are what they are.
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

AT_ONCE = 8  # inputs of one call of the engine: between two of them a request can end


class EmbeddingsRequest(Strict):
    """The body of `POST /v1/embeddings`."""

    input: Prompt
    model: Annotated[str, Field(max_length=1024)] | None = None
    encoding_format: Literal["float", "base64"] | None = Field(None, description="float by default")
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
    """A request that was read.

    Attributes:
        prompts: token ids.
        adapter: that computes them; None: the model alone.
        as_base64: how they are told.
    """

    prompts: list[list[int]]
    adapter: str | None
    as_base64: bool

    def portions(self) -> list[list[list[int]]]:
        """The prompts, a few a call."""
        places = range(0, len(self.prompts), AT_ONCE)
        return [self.prompts[place : place + AT_ONCE] for place in places]

    def answer(self, rows: Sequence[bytes], served: Served) -> dict[str, Any]:
        """What is answered. `rows`: little-endian float32, one a prompt."""
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
    """The request that a body holds. Raises as `ApiProtocol.prepare`."""
    request = read_body(body, EmbeddingsRequest, served.config)
    given = prompt_list(request.input, "input")
    require_at_most(len(given), served.config.max_samples, "input", "the number of inputs")
    adapter = adapter_of(request.model, served)
    prompts = [_token_ids(each, served) for each in given]
    return EmbeddingsAsked(prompts, adapter, request.encoding_format == "base64")


def _token_ids(given: str | list[int], served: Served) -> list[int]:
    if isinstance(given, str):
        require_possible_length(given, served, "input")
        given = need_tokenizer(served).encode(given, add_special_tokens=True)
    return checked_prompt(given, served, "input", least=0)
