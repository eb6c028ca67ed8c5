"""What `POST /v1/messages` takes, as pydantic models. Fields that are not named here are passed over.

Every content is a list of blocks here: a plain string is one text block.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TextBlock(_Model):
    """What is said."""

    type: Literal["text"]
    text: str


class ToolUseBlock(_Model):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(_Model):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(_Model):
    """What it thought, as only who wrote it can read it."""

    type: Literal["redacted_thinking"]


class OtherBlock(_Model):
    """A block of a kind that is not served; whoever meets it refuses it."""

    type: str


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text_tag(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return "text" if kind == "text" else "other"


TextOrOther = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")], Discriminator(_text_tag)
]
Texts = Annotated[list[TextOrOther], BeforeValidator(_as_blocks)]


class ToolResultBlock(_Model):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _tag(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if kind in _KINDS else "other"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_tag),
]


class Message(_Model):
    """A turn, or a part of one."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks)]


class Tool(_Model):
    """A tool of the client's. Tools of the provider's have another `type`."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(_Model):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Model):
    """Whether the model is to think first.

    `budget_tokens` is accepted and not enforced: `max_tokens` bounds thinking and answer together.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class CountRequest(_Model):
    """The body of `POST /v1/messages/count_tokens`: all that the prompt is made of."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Texts | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`. What follows `stream` are the engine's own parameters, as extensions."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
