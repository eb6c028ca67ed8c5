"""What `POST /v1/messages` takes, as pydantic models, and the prompt that comes of it.

Every content is a list of blocks here: a plain string is one text block. Tags in angle brackets are
left out of what errors say of a place.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
)

from nano_inference.server.api.parsing.tool_grammars import OfferedTool, ToolDemand
from nano_inference.server.api.shared.generation import Served
from nano_inference.server.api.shared.openapi import INTEGER, STRING, list_of, nullable, thing
from nano_inference.server.api.shared.requests import (
    MOST,
    SamplingFields,
    Schema,
    Strict,
    Strings,
    adapter_of,
    encode_conversation,
    require_at_most,
)
from nano_inference.server.errors import bad_request, shown


class CacheControl(Strict):
    """That the prompt up to here is to be cached, which it is anyway, and with `ttl` how long it is
    kept after the answer.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cached(Strict):
    """A part of a prompt that may say how long it is kept."""

    cache_control: CacheControl | None = None


SECONDS = {"5m": 300.0, "1h": 3600.0}


class TextBlock(Cached):
    """What is said."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Cached):
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
    """Thoughts that only their provider can read."""

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


class Other(Strict):
    """A kind that is not supported; its reader refuses it."""

    type: str


class Citations(Strict):
    """Whether the answer is to cite."""

    enabled: bool | None = None


def _by_type(*kinds: str) -> Discriminator:
    """Tells models apart by what `type` says; any other type is `<other>`."""

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
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


class DocumentBlock(Cached):
    """A text that the user shows."""

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
    """A turn, or a part of one."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks)]


class AnthropicTool(Cached):
    """A tool of the client's. Tools of the provider's have another `type`."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


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


class OutputFormat(Strict):
    """What the answer has to be: JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: Schema = Field(None, alias="schema")


class OutputConfig(Strict):
    """How the answer is to be. `effort` has no effect."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    """The body of `POST /v1/messages/count_tokens`: all that the prompt is made of."""

    model: str
    messages: list[AnthropicMessage]
    system: Texts | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # an extension: more names for the template
    refused = SamplingFields.refused | {
        "chat_template": (),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
    }


class MessagesRequest(CountRequest, SamplingFields):
    """The body of `POST /v1/messages`. The engine's own parameters are extensions."""

    max_tokens: Annotated[int, Field(ge=1, le=MOST)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Strings | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="output_config's, older")
    # Between a client and Anthropic.
    ignored = (
        *("betas", "context_management", "diagnostics"),
        *("inference_geo", "metadata", "service_tier", "speed"),
    )
    # What clients of other protocols ask for, or Anthropic's own.
    elsewhere: ClassVar[Mapping[str, str]] = {
        "stop": "use stop_sequences.",
        "n": "a message is one answer; send several requests.",
        "logprobs": "use /v1/chat/completions.",
        "top_logprobs": "use /v1/chat/completions.",
        "prompt_logprobs": "use /v1/chat/completions.",
        "raw_logprobs": "use /v1/chat/completions.",
        "sampling_mask": "use /v1/chat/completions.",
        "routed_experts": "use /v1/chat/completions.",
        "return_token_ids": "use /v1/chat/completions.",
        "response_format": "use output_config.format.",
        "mcp_servers": "let the client call them.",
        "container": "there are no containers here.",
    }


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


# Claude Code puts a line into the system text that differs with every request. It says nothing to a
# model, and with it no prefix of the prompt would ever be found in the cache.
_BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True)
class Conversation:
    """What a chat template takes.

    Attributes:
        messages: in the shape of OpenAI's, the arguments of tool calls as objects.
        tools: likewise; None: there are none, or none may be called.
        prefilled: the last message is the beginning of the answer.
        template_kwargs: more names for the template.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prefilled: bool
    template_kwargs: dict[str, Any]


def kept_seconds(request: MessagesRequest) -> float | None:
    """How long the blocks of a request are kept: the longest `ttl` in it, where it does not say so
    itself.
    """
    if request.keep_cache_seconds is not None:
        return None
    parts: list[Any] = [request, *(request.system or ()), *(request.tools or ())]
    for message in request.messages:
        for block in message.content:
            parts += [block, *(getattr(block, "content", None) or ())]
    asked = [getattr(part, "cache_control", None) for part in parts]
    seconds = [SECONDS[each.ttl] for each in asked if each is not None and each.ttl is not None]
    return max(seconds, default=None)


def encode(request: CountRequest, served: Served) -> list[int]:
    """The prompt's token ids. Raises `ApiError` and `InvalidRequest`."""
    adapter_of(request.model, served)
    if not request.messages:
        raise bad_request("messages is empty; give at least one.", "messages")
    require_at_most(
        len(request.messages), served.config.max_messages, "messages", "the number of messages"
    )
    given = conversation(request)
    return encode_conversation(
        given.messages,
        served,
        tools=given.tools,
        template_kwargs=given.template_kwargs,
        add_generation_prompt=not given.prefilled,
        continue_final_message=given.prefilled,
    )


def conversation(request: CountRequest) -> Conversation:
    """The conversation of a request.

    Turns of the same role that follow each other are one turn, as at Anthropic's; texts of one turn
    are joined by line feeds. Results of tools become messages of the role `tool`. A last message of
    the assistant's is the beginning of the answer, unless it is empty.

    Raises:
        ApiError: it holds what is not served, or what no conversation can be.
    """
    messages = _system(request.system or [])
    turns = _turns(request.messages)
    known: dict[str, str] = {}  # id -> tool of the calls of the turn before
    for place, (role, blocks) in enumerate(turns):
        if role == "assistant":
            messages.append(_assistant(blocks))
            known = {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
        elif role == "user":
            messages += _user(blocks, known)
        else:
            messages.append(
                {"role": "system", "content": _joined(_texts(blocks, "a system message"))}
            )
        if role == "assistant" and place == len(turns) - 1:
            _check_prefill(blocks)
    thinking = request.thinking is not None and request.thinking.type != "disabled"
    return Conversation(
        messages=messages,
        tools=_tools(request),
        prefilled=turns[-1][0] == "assistant",
        template_kwargs={"enable_thinking": thinking, **(request.chat_template_kwargs or {})},
    )


def _turns(messages: Sequence[AnthropicMessage]) -> list[tuple[str, list[Block]]]:
    turns: list[tuple[str, list[Block]]] = []
    for message in messages:
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(message.content)
        else:
            turns.append((message.role, list(message.content)))
    if turns[-1][0] == "assistant" and len(turns) > 1 and not _says_anything(turns[-1][1]):
        turns.pop()
    return turns


def goes_on(request: CountRequest) -> bool:
    """Whether the last message is the beginning of the answer."""
    return _turns(request.messages)[-1][0] == "assistant"


def _says_anything(blocks: Iterable[Block]) -> bool:
    return any(not isinstance(block, TextBlock) or block.text for block in blocks)


def _system(blocks: Sequence[TextOrOther]) -> list[dict[str, Any]]:
    texts = [_without_billing(text) for text in _texts(blocks, "system")]
    texts = [text for text in texts if text]
    return [{"role": "system", "content": _joined(texts)}] if texts else []


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _user(blocks: Sequence[Block], known: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages of the roles `tool` and `user`, in the order of the blocks."""
    messages: list[dict[str, Any]] = []
    said: list[str] = []

    def say() -> None:
        if said:
            messages.append({"role": "user", "content": _joined(said)})
            said.clear()

    for block in blocks:
        match block:
            case TextBlock(text=text):
                said.append(text)
            case DocumentBlock():
                said.append(_document(block))
            case ToolResultBlock():
                say()
                messages.append(_result(block, known))
            case _:
                raise _unsupported(block.type, "a user message")
    say()
    return messages or [{"role": "user", "content": ""}]


def _document(block: DocumentBlock) -> str:
    """Title and context, then the text."""
    if block.citations is not None and block.citations.enabled:
        raise bad_request("citations of a document are not supported; leave them out.", "messages")
    match block.source:
        case TextSource(data=text):
            pass
        case PartsSource(content=parts):
            text = _joined(_texts(parts, "a document"))
        case source:
            raise bad_request(
                f"a document of source type {shown(source.type)} is not supported: this server is "
                "for text.",
                "messages",
            )
    return _joined([block.title or "", block.context or "", text])


def _result(block: ToolResultBlock, known: Mapping[str, str]) -> dict[str, Any]:
    if block.tool_use_id not in known:
        raise bad_request(
            f"tool_result answers tool_use_id {shown(block.tool_use_id)}, but the assistant's "
            "turn before has no "
            "tool_use block of that id.",
            "messages",
        )
    text = _joined(_texts(block.content or [], "a tool_result"))
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "name": known[block.tool_use_id],
        "content": f"Error: {text}" if block.is_error else text,
    }


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=text):
                thoughts.append(text)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case RedactedThinkingBlock():
                pass
            case _:
                raise _unsupported(block.type, "an assistant message")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _joined(texts) or (None if calls else ""),
    }
    if any(thoughts):
        message["reasoning_content"] = _joined(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _check_prefill(blocks: Sequence[Block]) -> None:
    last = blocks[-1] if blocks else None
    if not isinstance(last, TextBlock):
        raise bad_request(
            "the last message is the assistant's and does not end in text, so the answer cannot "
            "begin with it; end "
            "with a user message, or with a tool_result for each tool_use.",
            "messages",
        )
    if last.text != last.text.rstrip():
        raise bad_request(
            "messages: final assistant content cannot end with trailing whitespace.", "messages"
        )


def _tools(request: CountRequest) -> list[dict[str, Any]] | None:
    choice, tools = request.tool_choice, request.tools or []
    functions = [_function(tool) for tool in tools]
    if choice is not None and choice.type in ("any", "tool") and not tools:
        raise bad_request(f"tool_choice of type {choice.type} needs tools.", "tool_choice")
    named = choice.name if choice is not None and choice.type == "tool" else None
    if named is not None and named not in {tool.name for tool in tools}:
        raise bad_request(
            f"tool_choice names {shown(named)}, which is not among the tools.", "tool_choice"
        )
    if choice is not None and choice.type == "tool" and named is None:
        raise bad_request("tool_choice of type tool needs a name.", "tool_choice")
    if choice is not None and choice.type == "none":
        return None
    return functions or None


def demand_of(request: CountRequest) -> ToolDemand | None:
    """How tools may be called, of a request that `encode` has taken; None: not at all."""
    choice, tools = request.tool_choice, request.tools or []
    kind = "auto" if choice is None else choice.type
    if not tools or kind == "none":
        return None
    offered = [
        OfferedTool(tool.name, tool.input_schema, bool(tool.strict))
        for tool in tools
        if kind != "tool" or (choice is not None and tool.name == choice.name)
    ]
    one = kind == "tool" or (choice is not None and bool(choice.disable_parallel_tool_use))
    return ToolDemand(offered, forced=kind in ("any", "tool"), parallel=not one)


def _function(tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise bad_request(
            f"tools of type {shown(tool.type)} are not supported; give tools with a name and an "
            "input_schema.",
            "tools",
        )
    if tool.input_schema is None:
        raise bad_request(f"tool {shown(tool.name)} has no input_schema.", "tools")
    described = {} if tool.description is None else {"description": tool.description}
    return {
        "type": "function",
        "function": {"name": tool.name, **described, "parameters": tool.input_schema},
    }


def _texts(blocks: Iterable[Block | TextOrOther], where: str) -> list[str]:
    texts: list[str] = []
    for block in blocks:
        if not isinstance(block, TextBlock):
            raise _unsupported(block.type, where)
        texts.append(block.text)
    return texts


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text)


def _unsupported(kind: str, where: str) -> Exception:
    return bad_request(
        f"a content block of type {shown(kind)} in {where} is not supported: this server is for "
        "text.",
        "messages",
    )
