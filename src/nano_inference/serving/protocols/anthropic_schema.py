"""What `POST /v1/messages` takes, as pydantic models.

Every content is a list of blocks here: a plain string is one text block. Tags in angle brackets are
left out of what errors say of a place.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from nano_inference.serving.protocols.fields import MOST, SamplingFields, Strings
from nano_inference.serving.protocols.openapi import INTEGER, STRING, list_of, nullable, thing
from nano_inference.serving.protocols.reading import Strict


class TextBlock(Strict):
    """What is said."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Strict):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Strict):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Strict):
    """What it thought, as only who wrote it can read it."""

    type: Literal["redacted_thinking"]


class TextSource(Strict):
    """A document's text."""

    type: Literal["text"]
    media_type: Literal["text/plain"] | None = None
    data: str


class PartsSource(Strict):
    """A document's text in parts."""

    type: Literal["content"]
    content: "Texts"


class OtherSource(Strict):
    """A document that is no text; whoever meets it refuses it."""

    type: str


class Citations(Strict):
    """Whether the answer is to cite."""

    enabled: bool | None = None


class OtherBlock(Strict):
    """A block of a kind that is not served; whoever meets it refuses it."""

    type: str


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text_tag(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return "<text>" if kind == "text" else "<other>"


TextOrOther = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_text_tag),
]
Texts = Annotated[list[TextOrOther], BeforeValidator(_as_blocks)]


class ToolResultBlock(Strict):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


def _source_tag(source: object) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    return f"<{kind}>" if kind in ("text", "content") else "<other>"


class DocumentBlock(Strict):
    """A text that the user shows."""

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("<text>")]
        | Annotated[PartsSource, Tag("<content>")]
        | Annotated[OtherSource, Tag("<other>")],
        Discriminator(_source_tag),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


_KINDS = ("text", "document", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _tag(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"<{kind}>" if kind in _KINDS else "<other>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_tag),
]


class Message(Strict):
    """A turn, or a part of one."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks)]


class Tool(Strict):
    """A tool of the client's. Tools of the provider's have another `type`."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Strict):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether the model is to think first.

    `budget_tokens` is accepted and not enforced: `max_tokens` bounds thinking and answer together.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Strict):
    """How the answer is to be. `effort` has no effect."""

    effort: str | None = None
    format: Any = None

    @field_validator("format", mode="before")
    @classmethod
    def _refuse(cls, value: object) -> None:
        if value is not None:
            raise ValueError("structured output is not supported yet.")


class CountRequest(Strict):
    """The body of `POST /v1/messages/count_tokens`: all that the prompt is made of."""

    model: str
    messages: list[Message]
    system: Texts | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # an extension: more names for the template


# What clients of other protocols ask for, or Anthropic's own, and what to do instead.
_REFUSED = {
    "stop": "use stop_sequences.",
    "n": "a message is one answer; send several requests.",
    "logprobs": "use /v1/chat/completions.",
    "top_logprobs": "use /v1/chat/completions.",
    "prompt_logprobs": "use /v1/chat/completions.",
    "raw_logprobs": "use /v1/chat/completions.",
    "sampling_mask": "use /v1/chat/completions.",
    "return_token_ids": "use /v1/chat/completions.",
    "response_format": "there is no structured output yet.",
    "output_format": "there is no structured output yet.",
    "mcp_servers": "let the client call them.",
    "container": "there are no containers here.",
}
NOT_HERE = Annotated[Any, WithJsonSchema({"type": "null"})]


class MessagesRequest(CountRequest, SamplingFields):
    """The body of `POST /v1/messages`. The engine's own parameters are extensions."""

    max_tokens: Annotated[int, Field(ge=1, le=MOST)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Strings | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None

    stop: NOT_HERE = None
    n: NOT_HERE = None
    logprobs: NOT_HERE = None
    top_logprobs: NOT_HERE = None
    prompt_logprobs: NOT_HERE = None
    raw_logprobs: NOT_HERE = None
    sampling_mask: NOT_HERE = None
    return_token_ids: NOT_HERE = None
    response_format: NOT_HERE = None
    output_format: NOT_HERE = None
    mcp_servers: NOT_HERE = None
    container: NOT_HERE = None

    # Without effect: prefixes are cached anyway, and the rest is between a client and Anthropic.
    betas: Any = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None

    @field_validator(*_REFUSED, mode="before")
    @classmethod
    def _refuse(cls, value: object, info: ValidationInfo) -> None:
        """Null, false, zero and nothing are harmless, and so is one answer."""
        if value and not (info.field_name == "n" and value == 1):
            raise ValueError(f"not supported here; {_REFUSED[str(info.field_name)]}")


# What is answered, for `/openapi.json`.
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
