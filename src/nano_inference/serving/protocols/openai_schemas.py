"""The JSON schemas of OpenAI's answers, as strict as OpenAI's own document where that says what is
required.
"""

from typing import Any

from nano_inference.serving.protocols.openapi import (
    INTEGER,
    NUMBER,
    STRING,
    list_of,
    nullable,
    thing,
)

_REASON = {"enum": ["stop", "length", "tool_calls", "abort"]}
_USAGE = thing(
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=thing(cached_tokens=INTEGER),
    completion_tokens_details=thing(reasoning_tokens=INTEGER),
)
_TOP = thing(
    "token", "logprob", "bytes", token=STRING, logprob=NUMBER, bytes=nullable(list_of(INTEGER))
)
_TOKEN = thing(
    "token",
    "logprob",
    "bytes",
    "top_logprobs",
    token=STRING,
    logprob=NUMBER,
    bytes=nullable(list_of(INTEGER)),
    top_logprobs=list_of(_TOP),
)
_TOOL_CALL = thing(
    "id",
    "type",
    "function",
    id=STRING,
    type={"const": "function"},
    function=thing("name", "arguments", name=STRING, arguments=STRING),
)
_MESSAGE = thing(
    "role",
    "content",
    "refusal",
    "reasoning_content",
    "reasoning",
    role={"const": "assistant"},
    content=nullable(STRING),
    refusal={"type": "null"},
    reasoning_content=nullable(STRING),
    reasoning=nullable(STRING),
    tool_calls=list_of(_TOOL_CALL),
)
_ENDING = {
    "finish_reason": _REASON,
    "stop_reason": {"type": ["string", "integer", "null"]},
    "seed": INTEGER,
    "weight_version": INTEGER,
    "token_ids": nullable(list_of(INTEGER)),
    "routed_experts": {"type": "null"},
}
_IDS = nullable(list_of(INTEGER))
_RANKED = thing(
    "logprob", "rank", logprob=NUMBER, rank=nullable(INTEGER), decoded_token=nullable(STRING)
)
_PROMPT_LOGPROBS = nullable(list_of(nullable({"type": "object", "additionalProperties": _RANKED})))


def _answer(kind: str, *required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an answer whose `object` is `kind`; the rest is its choices'."""
    choice = thing(
        "index", *required, "logprobs", "finish_reason", index=INTEGER, **_ENDING, **properties
    )
    return thing(
        *("id", "object", "created", "model", "choices", "usage"),
        id=STRING,
        object={"const": kind},
        created=INTEGER,
        model=STRING,
        system_fingerprint=STRING,
        choices=list_of(choice),
        usage=_USAGE,
        prompt_logprobs=_PROMPT_LOGPROBS,
        prompt_token_ids=_IDS,
        kv_transfer_params={"type": "null"},
    )


CHAT = _answer(
    "chat.completion",
    "message",
    message=_MESSAGE,
    logprobs=nullable(thing("content", "refusal", content=nullable(list_of(_TOKEN)))),
)
COMPLETION = _answer(
    "text_completion",
    "text",
    text=STRING,
    prompt_logprobs=_PROMPT_LOGPROBS,
    prompt_token_ids=_IDS,
    logprobs=nullable(
        thing(
            *("tokens", "token_logprobs", "top_logprobs", "text_offset"),
            tokens=list_of(STRING),
            token_logprobs=list_of(nullable(NUMBER)),
            top_logprobs=list_of(nullable({"type": "object", "additionalProperties": NUMBER})),
            text_offset=list_of(INTEGER),
        )
    ),
)
MODEL = thing(
    "id",
    "object",
    "created",
    "owned_by",
    id=STRING,
    object={"const": "model"},
    created=INTEGER,
    owned_by=STRING,
    max_model_len=INTEGER,
)
MODELS = thing("object", "data", object={"const": "list"}, data=list_of(MODEL))
TOKENS = thing(
    "count",
    "max_model_len",
    "tokens",
    "token_strs",
    count=INTEGER,
    max_model_len=INTEGER,
    tokens=list_of(INTEGER),
    token_strs=nullable(list_of(STRING)),
)
TEXT = thing("prompt", prompt=STRING)
