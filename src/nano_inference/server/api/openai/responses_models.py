"""Fields of `POST /v1/responses`, as pydantic models.

An input is a list of items: messages, function calls, their outputs, and reasoning. Several items
of the assistant may be one turn, which is one message in a chat.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from nano_inference.server.api.openai.models import JsonSchemaFormat
from nano_inference.server.api.shared.fields import (
    MOST,
    RETENTION,
    Retention,
    SamplingFields,
    Strict,
)
from nano_inference.server.api.shared.openapi import INTEGER, STRING, list_of, nullable, thing

Item = dict[str, Any]
ChatMessage = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"  # values of `include`
ENCRYPTED = "reasoning.encrypted_content"
# the others are parts of items that this server does not make
INCLUDABLE = (
    *(LOGPROBS, ENCRYPTED, "message.input_image.image_url", "file_search_call.results"),
    *("web_search_call.results", "web_search_call.action.sources"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
)


class InputFormat(Strict):
    """Format of a custom tool's input."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class PlainTool(Strict):
    """Tool that the model may use. `responses_tools` lists the types."""

    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None  # for a custom tool
    environment: dict[str, Any] | None = None  # for a shell
    execution: str | None = None  # for a tool search
    defer_loading: bool | None = None  # offer it only once a tool search has found it
    ignored = (
        "output_schema",
        # parts of a web search, which no model sees
        *("external_web_access", "search_context_size", "search_content_types"),
        *("user_location", "filters"),
    )
    refused: ClassVar[dict[str, Sequence[Any]]] = {
        "async": (False,),
        "allowed_callers": (["direct"],),
    }


class ResponseTool(PlainTool):
    """Tool, or a namespace of tools."""

    tools: list[PlainTool] | None = None


class TextFormat(JsonSchemaFormat):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]


class TextConfig(Strict):
    """Settings of the answer's text. The chat template gets `verbosity` as a variable."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    """Setting for reasoning. Reasoning is answered in full, without a summary."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(Strict):
    """Settings of a stream. `include_obfuscation` has no effect, since nothing hides lengths."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields):
    """Body of `POST /v1/responses`. The engine's own parameters are extensions."""

    input: Annotated[
        Any,
        WithJsonSchema({"anyOf": [{"type": "string"}, list_of({"type": "object"})]}),
    ]
    model: Annotated[str, Field(max_length=1024)] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="Default: the rest of the context"
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Annotated[
        Any,
        WithJsonSchema(
            {"anyOf": [{"enum": ["auto", "none", "required", None]}, {"type": "object"}]}
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = Field(None, description="false: do not store the response. Default: true")
    background: bool | None = Field(
        None, description="Answer at once with a queued response, and generate without the client"
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: omit the oldest turns of a conversation that is too long"
    )
    max_tool_calls: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="Limit of calls that a server runs; this one runs none"
    )
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    prompt_cache_retention: Retention | None = RETENTION
    # extensions: variables of the template, and reasoning of earlier turns
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_history: Literal["keep", "strip"] | None = None
    ignored = ("service_tier", "prompt_cache_options", "client_metadata")
    refused = SamplingFields.refused | {
        "background_options": (),
        "conversation": (),
        "moderation": (),
        "prompt": (),
        "context_management": ([],),
        "chat_template": (),
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        "messages": "use input.",
        "n": "send several requests, since a response has only one answer.",
        "stop": "use /v1/chat/completions.",
        "max_tokens": "use max_output_tokens.",
        "max_completion_tokens": "use max_output_tokens.",
        "response_format": "use text.format.",
        "reasoning_effort": "use reasoning.effort.",
        "logprobs": f"add {LOGPROBS} to include.",
        "prompt_logprobs": "use /v1/chat/completions.",
        "return_token_ids": "use /v1/chat/completions.",
    }


# schemas of answers for `/openapi.json`
RESPONSE = thing(
    *("id", "object", "created_at", "status", "error", "incomplete_details", "model", "output"),
    *("parallel_tool_calls", "previous_response_id", "store", "tools", "tool_choice", "usage"),
    id=STRING,
    object={"const": "response"},
    created_at=INTEGER,
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    error=nullable(thing("code", "message", code=STRING, message=STRING)),
    incomplete_details=nullable(thing("reason", reason=STRING)),
    model=STRING,
    output=list_of(thing("id", "type", id=STRING, type=STRING)),
    previous_response_id=nullable(STRING),
    usage=nullable(
        thing(
            *("input_tokens", "output_tokens", "total_tokens"),
            input_tokens=INTEGER,
            output_tokens=INTEGER,
            total_tokens=INTEGER,
        )
    ),
)
ITEMS = thing(
    *("object", "data", "has_more", "first_id", "last_id"),
    object={"const": "list"},
    data=list_of({"type": "object"}),
    has_more={"type": "boolean"},
    first_id=nullable(STRING),
    last_id=nullable(STRING),
)
DELETED = thing("id", "object", "deleted", id=STRING, deleted={"const": True})
