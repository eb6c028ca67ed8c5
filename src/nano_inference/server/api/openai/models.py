"""Models of OpenAI's requests and JSON schemas of its answers, as strict as OpenAI's specification.
Additional fields have vLLM's names if vLLM has them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from nano_inference.server.api.shared.answers import Flat
from nano_inference.server.api.shared.fields import (
    MOST,
    RETENTION,
    OneOrMany,
    PromptLogprobs,
    ReceiptField,
    Retention,
    SamplingFields,
    Schema,
    Strict,
    TokenIds,
)
from nano_inference.server.api.shared.openapi import (
    INTEGER,
    NUMBER,
    STRING,
    list_of,
    nullable,
    thing,
)

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

# checked by hand: pydantic would report each of a hundred thousand ids once per form
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
Content = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]

# true or false; some trainers send 1 and 0
Flag = Annotated[
    bool | None,
    BeforeValidator(lambda value: bool(value) if type(value) is int and value in (0, 1) else value),
    WithJsonSchema({"type": ["boolean", "null"]}),
]


# number of a prompt's `n` samples that may finish; the others then end as "abort" with their tokens
Wanted = (
    Annotated[int, Field(ge=1, le=MOST, description="Number of the n samples that may finish")]
    | None
)
# name of a weight version, or its number for trainers that count
VersionName = Annotated[Any, WithJsonSchema({"type": ["string", "integer", "null"]})]


class StreamOptions(Strict):
    """Additional contents of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Strict):
    """Schema with its name, enforced even if it is not strict."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Schema = Field(None, alias="schema")


class ResponseFormat(Strict):
    """Format of the answer. `schema` is llama.cpp's field. `structures`, `triggers` and `format`
    are fields of a structural tag.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema = Field(None, alias="schema")
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None


class OpenAIFields(SamplingFields):
    """Fields of completions and chat completions."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    stop: OneOrMany | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    receipt: ReceiptField = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens in logprobs as "token_id:123"'
    )
    prompt_logprobs: PromptLogprobs = None
    logprob_token_ids: TokenIds | None = Field(
        None, description="Ids whose logprobs take the place of the most probable tokens'"
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Include the stop string in the text"
    )
    skip_special_tokens: bool | None = Field(
        None, description="false: show the names of special tokens in the text"
    )
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Id of the answer, after its prefix; can be used to abort the request"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(
        None,
        description="Truncate the prompt to this many tokens; -1: to the context less the "
        "completion",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Side to truncate. Default: left"
    )
    prompt_cache_retention: Retention | None = RETENTION
    n_wanted: Wanted = None
    min_weight_version: VersionName = None
    response_format: ResponseFormat | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST)] | None = Field(None, description="Must equal n")
    ignored = (
        *("user", "metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options"),
    )
    refused = {
        name: each
        for name, each in SamplingFields.refused.items()
        if name not in ("truncate_prompt_tokens", "logprob_token_ids")
    } | {"moderation": ()}


class CompletionRequest(OpenAIFields):
    """Body of `POST /v1/completions`."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(None, description="Default: 16")
    max_completion_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="Newer name of max_tokens"
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(None, description="-1: all")
    flat_logprobs: Flat | None = Field(
        None, description="Return token_logprobs and token_ids in each choice, without other rows"
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokens that the tokenizer puts around a text. Default: true"
    )
    refused = OpenAIFields.refused | {
        "suffix": ("",),
        "store": (False,),
        "top_logprobs": (0,),  # chats only: ignoring it would change the answer
    }


class FunctionCall(Strict):
    """Function call in an earlier answer."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[Any, WithJsonSchema({"type": "string"})] = None


class ToolCallMessage(Strict):
    """Tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """Message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Strict):
    """Function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Tool that the model may use."""

    type: Literal["function"] = "function"
    function: Function


class ChatTemplateFields(Strict):
    """Fields that determine how a chat becomes a prompt."""

    tools: list[Tool] | None = None
    tool_choice: Annotated[
        Any,
        WithJsonSchema(
            {"anyOf": [{"enum": ["auto", "none", "required", None]}, {"type": "object"}]}
        ),
    ] = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = Field(
        None, description="The variable of this name in chat_template_kwargs"
    )
    reasoning_history: Literal["keep", "strip"] | None = Field(
        None, description="Reasoning of earlier turns. Default: the template decides"
    )
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="Add the tokens that the tokenizer puts around a text"
    )
    documents: list[dict[str, Any]] | None = Field(
        None, description="Documents, for templates that render them"
    )
    continue_final_message: bool | None = None
    refused: ClassVar[dict[str, Sequence[Any]]] = {"chat_template": ()}


class ChatRequest(OpenAIFields, ChatTemplateFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="Default: the rest of the context"
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = None
    logprobs: Flag = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(None, description="-1: all")
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = Field(
        None, description="false: omit reasoning from the answer"
    )
    ignored = (*OpenAIFields.ignored, "verbosity", "store")
    refused = (
        OpenAIFields.refused
        | ChatTemplateFields.refused
        | {
            "audio": (),
            "modalities": (["text"],),
            "prediction": (),
            "web_search_options": (),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "echo": (False,),
        }
    )


# fields in OpenAI's specification; a request with any other comes from a client of vLLM or ours
_OPENAIS = frozenset(
    (
        *("model", "messages", "prompt", "echo", "best_of", "n", "stop", "stream"),
        *("stream_options", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "seed", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens"),
        *("response_format", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
        "prompt_cache_retention",
    )
)
BEYOND_OPENAI = {*CompletionRequest.model_fields, *ChatRequest.model_fields} - _OPENAIS


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
    "routed_experts": nullable(STRING),
    "receipt": {"type": "object"},
}
_TOLD_IDS = nullable(list_of(INTEGER))
_RANKED = thing(
    "logprob", "rank", logprob=NUMBER, rank=nullable(INTEGER), decoded_token=nullable(STRING)
)
_PROMPT_LOGPROBS = nullable(list_of(nullable({"type": "object", "additionalProperties": _RANKED})))


def _answer(kind: str, *required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an answer with this `object`. The other arguments describe a choice."""
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
        prompt_token_ids=_TOLD_IDS,
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
    prompt_token_ids=_TOLD_IDS,
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
