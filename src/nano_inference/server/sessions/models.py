"""Bodies and answers of the routes of sessions."""

from typing import Annotated, Any, Literal

from pydantic import Field

from nano_inference.server.api.openai.models import ChatRequest, Message, Tool
from nano_inference.server.api.shared.fields import MOST, MOST_KEPT_SECONDS, Strict
from nano_inference.server.api.shared.openapi import (
    INTEGER,
    NUMBER,
    STRING,
    list_of,
    nullable,
    thing,
)

_PRIORITY = Field(ge=-(2**31), lt=2**31)


class SessionRequest(Strict):
    """Body of `POST /sessions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: Annotated[str, Field(max_length=1024)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    on_rewrite: Literal["reject", "keep"] | None = Field(
        None,
        description="If the chat template renders an earlier turn differently than it was sampled: "
        "reject (default), or keep the sampled ids",
    )
    priority: Annotated[int, _PRIORITY] | None = Field(None, description="Lower goes first")
    keep_cache_seconds: Annotated[float, Field(ge=0, le=MOST_KEPT_SECONDS)] | None = Field(
        None, description="Time that blocks stay cached after each turn, in seconds"
    )
    cache_priority: Annotated[int, _PRIORITY] | None = Field(
        None, description="Higher is evicted later; requires keep_cache_seconds"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class MessagesRequest(Strict):
    """Body of `POST /sessions/{id}/messages`."""

    messages: Annotated[list[Message], Field(min_length=1)]


class ForkRequest(Strict):
    """Body of `POST /sessions/{id}/fork`."""

    n: Annotated[int, Field(ge=1, le=MOST)] = Field(1, description="Number of new sessions")


class TurnRequest(ChatRequest):
    """Body of `POST /sessions/{id}/chat/completions`: that of a chat completion, with the new
    messages only.
    """

    messages: list[Message] = Field([], description="Messages to append first")
    refused = ChatRequest.refused | {
        "documents": ([],),
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "continue_final_message": (False,),
        "truncate_prompt_tokens": (),
    }


SESSION = thing(
    *("id", "object", "created_at", "parent", "num_messages", "num_tokens", "state", "model"),
    id=STRING,
    object={"const": "session"},
    created_at=INTEGER,
    parent=nullable(STRING),
    num_messages=INTEGER,
    num_tokens=INTEGER,
    state={"enum": ["open", "sampling", "answered"]},
    model=STRING,
    expires_in=NUMBER,
)
SESSIONS = thing("object", "data", object={"const": "list"}, data=list_of(SESSION))
_SPAN = thing(
    *("start", "end", "author", "num_messages"),
    start=INTEGER,
    end=INTEGER,
    author={"enum": ["template", "model"]},
    num_messages=INTEGER,
)
TOKENS = thing(
    *("id", "token_ids", "logprobs", "loss_mask", "spans"),
    id=STRING,
    token_ids=list_of(INTEGER),
    logprobs=list_of(NUMBER),
    loss_mask=list_of({"type": "boolean"}),
    spans=list_of(_SPAN),
)
PREFETCHED = thing("id", "cached_tokens", id=STRING, cached_tokens=INTEGER)
CLOSED = thing("id", "object", "deleted", id=STRING, deleted={"const": True})
