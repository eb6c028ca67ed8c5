"""Conversion of the Messages API's messages and tools to a prompt."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nano_inference.server.api.anthropic.models import (
    SECONDS,
    AnthropicMessage,
    AnthropicTool,
    Block,
    CountRequest,
    DocumentBlock,
    MessagesRequest,
    PartsSource,
    RedactedThinkingBlock,
    TextBlock,
    TextOrOther,
    TextSource,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from nano_inference.server.api.parsing.tool_grammars import OfferedTool, ToolDemand
from nano_inference.server.api.shared.prompts import (
    adapter_of,
    encode_conversation,
    require_at_most,
)
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.errors import bad_request, shown

# Claude Code adds a line to the system text that differs in every request. The line is removed,
# since it is irrelevant to a model and would make prefix hits impossible.
_BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True)
class Conversation:
    """Conversation in the form for a chat template.

    Attributes:
        messages: Messages in OpenAI's form, with the arguments of tool calls as objects.
        tools: Tools in OpenAI's form. None: no tool is offered or may be called.
        prefilled: True if the last message is the beginning of the answer.
        template_kwargs: More template variables.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prefilled: bool
    template_kwargs: dict[str, Any]


def kept_seconds(request: MessagesRequest) -> float | None:
    """Return the seconds for which a request's blocks are kept, from the longest `ttl` in it. None
    without a `ttl`, or if the request has `keep_cache_seconds`.
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
    """Return the prompt's token ids. Raises `ApiError` and `InvalidRequest`."""
    adapter_of(request.model, served)
    if not request.messages:
        raise bad_request("messages is empty; give at least one.", "messages")
    require_at_most(
        len(request.messages), served.config.max_messages, "messages", "the number of messages"
    )
    chat = conversation(request)
    return encode_conversation(
        chat.messages,
        served,
        tools=chat.tools,
        template_kwargs=chat.template_kwargs,
        add_generation_prompt=not chat.prefilled,
        continue_final_message=chat.prefilled,
        history=request.reasoning_history,
    )


def conversation(request: CountRequest) -> Conversation:
    """Return the conversation of a request.

    Consecutive messages of the same role are merged, as at Anthropic, and their texts are joined by
    line feeds. Tool results become messages of the role `tool`. If the last message is the
    assistant's and not empty, it is the beginning of the answer.

    Raises:
        ApiError: The conversation is malformed or has unsupported parts.
    """
    messages = _system(request.system or [])
    turns = _turns(request.messages)
    known: dict[str, str] = {}  # id -> tool, for the calls of the previous turn
    for index, (role, blocks) in enumerate(turns):
        if role == "assistant":
            messages.append(_assistant(blocks))
            known = {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
        elif role == "user":
            messages += _user(blocks, known)
        else:
            messages.append(
                {"role": "system", "content": _joined(_texts(blocks, "a system message"))}
            )
        if role == "assistant" and index == len(turns) - 1:
            _check_prefill(blocks)
    return Conversation(
        messages=messages,
        tools=_tools(request),
        prefilled=turns[-1][0] == "assistant",
        template_kwargs={
            "enable_thinking": thinks(request),
            **(request.chat_template_kwargs or {}),
        },
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


def thinks(request: CountRequest) -> bool:
    """Return True if the model is asked to think."""
    return request.thinking is not None and request.thinking.type != "disabled"


def goes_on(request: CountRequest) -> bool:
    """Return True if the last message is the beginning of the answer."""
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
    """Return messages of the roles `tool` and `user`, in the order of the blocks."""
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
    """Return title, context and text of a document."""
    if block.citations is not None and block.citations.enabled:
        raise bad_request("citations of a document are not supported; leave them out.", "messages")
    match block.source:
        case TextSource(data=text):
            pass
        case PartsSource(content=parts):
            text = _joined(_texts(parts, "a document"))
        case source:
            raise bad_request(
                f"a document of source type {shown(source.type)} is not supported, because this "
                "server reads only text.",
                "messages",
            )
    return _joined([block.title or "", block.context or "", text])


def _result(block: ToolResultBlock, known: Mapping[str, str]) -> dict[str, Any]:
    if block.tool_use_id not in known:
        raise bad_request(
            f"tool_result has tool_use_id {shown(block.tool_use_id)}, but the previous assistant "
            "message has no tool_use block of that id.",
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
            "continue it; end with a user message, or with a tool_result for each tool_use.",
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
        raise bad_request(f"tool_choice of type {choice.type} requires tools.", "tool_choice")
    named = choice.name if choice is not None and choice.type == "tool" else None
    if named is not None and named not in {tool.name for tool in tools}:
        raise bad_request(
            f"tool_choice names {shown(named)}, which is not among the tools.", "tool_choice"
        )
    if choice is not None and choice.type == "tool" and named is None:
        raise bad_request("tool_choice of type tool requires a name.", "tool_choice")
    if choice is not None and choice.type == "none":
        return None
    return functions or None


def demand_of(request: CountRequest) -> ToolDemand | None:
    """Return the tool calls that a valid request allows or forces. None: no tool may be called."""
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
        raise bad_request(f"tool {shown(tool.name)} has no input_schema; add one.", "tools")
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
        f"a content block of type {shown(kind)} in {where} is not supported, because this server "
        "reads only text.",
        "messages",
    )
