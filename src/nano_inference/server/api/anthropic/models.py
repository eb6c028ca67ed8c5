"""Fields of `POST /v1/messages`, as pydantic models.

Every content is a list of blocks, since a plain string is read as one text block. Tags in angle
brackets are omitted from the field names in errors.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
)

from nano_inference.server.api.shared.fields import MOST, SamplingFields, Schema, Strict, Strings
from nano_inference.server.api.shared.openapi import INTEGER, STRING, list_of, nullable, thing


class CacheControl(Strict):
    """Cache control of the prompt up to this part. Prefixes are always cached. `ttl` is the time
    for which the request's blocks are kept after the answer.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cached(Strict):
    """Part of a prompt that may have cache control."""

    cache_control: CacheControl | None = None


SECONDS = {"5m": 300.0, "1h": 3600.0}


class TextBlock(Cached):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Cached):
    """Tool call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Strict):
    """Reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Strict):
    """Encrypted reasoning, which is ignored."""

    type: Literal["redacted_thinking"]


class TextSource(Strict):
    """Text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] | None = None
    data: str


class PartsSource(Strict):
    """Text of a document, in parts."""

    type: Literal["content"]
    content: "Texts"


class Other(Strict):
    """Unsupported type, which is rejected later."""

    type: str


class Citations(Strict):
    """Citation settings of a document."""

    enabled: bool | None = None


def _by_type(*kinds: str) -> Discriminator:
    """Return a discriminator by the value of `type`. Other types get the tag `<other>`."""

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        return f"<{kind}>" if kind in kinds else "<other>"

    return Discriminator(tag)


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextOrOther = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[Other, Tag("<other>")],
    _by_type("text"),
]
Texts = Annotated[list[TextOrOther], BeforeValidator(_as_blocks)]


class ToolResultBlock(Cached):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


class DocumentBlock(Cached):
    """Document of the user, as text."""

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("<text>")]
        | Annotated[PartsSource, Tag("<content>")]
        | Annotated[Other, Tag("<other>")],
        _by_type("text", "content"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[Other, Tag("<other>")],
    _by_type("text", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]


class AnthropicMessage(Strict):
    """Message of the user, the assistant or the system."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks)]


class AnthropicTool(Cached):
    """Tool of the client. Anthropic's own tools have another `type`."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Strict):
    """Choice between tool calls and text."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Setting for reasoning before the answer.

    `budget_tokens` limits the reasoning. It is lowered so that an answer fits into `max_tokens`.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """Format of the answer: JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: Schema = Field(None, alias="schema")


class OutputConfig(Strict):
    """Settings of the answer. `effort` has no effect."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    """Body of `POST /v1/messages/count_tokens`: all parts of the prompt."""

    model: str
    messages: list[AnthropicMessage]
    system: Texts | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # extension: more template variables
    reasoning_history: Literal["keep", "strip"] | None = None  # extension: earlier thoughts
    refused = SamplingFields.refused | {
        "chat_template": (),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
    }


class MessagesRequest(CountRequest, SamplingFields):
    """Body of `POST /v1/messages`. The engine's own parameters are extensions."""

    max_tokens: Annotated[int, Field(ge=1, le=MOST)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Strings | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="Older form of output_config")
    # only relevant at Anthropic
    ignored = (
        *("betas", "context_management", "diagnostics"),
        *("inference_geo", "metadata", "service_tier", "speed"),
    )
    # fields of other protocols, and of Anthropic's other services
    elsewhere: ClassVar[Mapping[str, str]] = {
        "stop": "use stop_sequences.",
        "n": "send several requests, since a message has only one answer.",
        "logprobs": "use /v1/chat/completions.",
        "top_logprobs": "use /v1/chat/completions.",
        "prompt_logprobs": "use /v1/chat/completions.",
        "raw_logprobs": "use /v1/chat/completions.",
        "sampling_mask": "use /v1/chat/completions.",
        "routed_experts": "use /v1/chat/completions.",
        "receipt": "use /v1/chat/completions.",
        "return_token_ids": "use /v1/chat/completions.",
        "response_format": "use output_config.format.",
        "mcp_servers": "let the client call them.",
        "container": "this server has no containers.",
    }


# schemas of answers for `/openapi.json`
MESSAGE = thing(
    *("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"),
    id=STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    model=STRING,
    content=list_of(thing("type", type={"enum": ["thinking", "text", "tool_use"]})),
    stop_reason=STRING,
    stop_sequence=nullable(STRING),
    usage=thing(
        input_tokens=INTEGER,
        output_tokens=INTEGER,
        cache_creation_input_tokens=INTEGER,
        cache_read_input_tokens=INTEGER,
    ),
)
COUNT = thing("input_tokens", input_tokens=INTEGER)
ERROR = thing(
    *("type", "error", "request_id"),
    type={"const": "error"},
    error=thing("type", "message", type=STRING, message=STRING),
    request_id=STRING,
)
