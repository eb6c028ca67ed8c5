"""Conversion of a request of the Responses API to the equivalent chat request."""

from collections.abc import Iterable, Sequence
from typing import Any

from nano_inference.server.api.openai.models import ChatRequest
from nano_inference.server.api.openai.responses_models import (
    LOGPROBS,
    ChatMessage,
    Item,
    ResponsesRequest,
    ResponseTool,
    TextConfig,
)
from nano_inference.server.api.shared.fields import (
    SamplingFields,
    validated,
)
from nano_inference.server.errors import bad_request, shown

_NO_EFFECT = ("reasoning.encrypted_content",)
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its field


def chat_request(request: ResponsesRequest, before: Sequence[ChatMessage]) -> ChatRequest:
    """Return the equivalent chat request.

    Args:
        request: Request of the Responses API.
        before: Messages of earlier responses, which precede its input.

    Raises:
        ApiError: 400, the request has unsupported parts.
    """
    include = set(request.include or ())
    if unknown := include - {LOGPROBS, *_NO_EFFECT}:
        raise bad_request(
            f"include holds {shown(min(unknown))}; only {LOGPROBS} can be included.", "include"
        )
    messages = [*before, *messages_of(request.input)]
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    fields = request.model_dump(include=_SHARED, by_alias=True, exclude_none=True) | {
        "messages": _with_one_beginning(messages),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": LOGPROBS in include,
        "top_logprobs": request.top_logprobs if LOGPROBS in include else None,
        "tools": [_tool(tool, index) for index, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "response_format": _format(request.text),
    }
    return validated(ChatRequest, {name: each for name, each in fields.items() if each is not None})


_SHARED = {
    *SamplingFields.model_fields,
    *("model", "temperature", "stream", "parallel_tool_calls", "chat_template_kwargs"),
    *("prompt_cache_retention", "enable_thinking", "reasoning_history"),
}


def _with_one_beginning(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Merge the first system messages into one, because many templates accept only one."""
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    if count < 2:
        return messages
    text = "\n\n".join(each["content"] for each in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def items_of(value: object) -> list[Item]:
    """Return the items of an input. A text becomes a message of the user. Raises `ApiError`."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise bad_request("input must be a string or a list of at least one item.", "input")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise bad_request(
                f"input.{index} must be an object, not {shown(item)}.", f"input.{index}"
            )
    return value


def messages_of(value: object) -> list[ChatMessage]:
    """Return the messages of an input. Consecutive items of the assistant become one message.
    Raises `ApiError`.
    """
    return joined(_message(item, f"input.{index}") for index, item in enumerate(items_of(value)))


def joined(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Merge consecutive messages of the assistant."""
    merged: list[ChatMessage] = []
    for message in messages:
        last = merged[-1] if merged else None
        if message["role"] != "assistant" or last is None or last["role"] != "assistant":
            merged.append(message)
            continue
        turn = dict(last)
        for name in ("content", "reasoning_content"):
            if both := [each[name] for each in (last, message) if each.get(name)]:
                turn[name] = "\n".join(both)
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            turn["tool_calls"] = calls
        merged[-1] = turn
    return merged


def _message(item: Item, where: str) -> ChatMessage:
    match item.get("type", "message"):
        case "message":
            role = _text(item, "role", where)
            return {"role": role, "content": _content(item.get("content"), f"{where}.content")}
        case "function_call":
            function = {
                "name": _text(item, "name", where),
                "arguments": _text(item, "arguments", where),
            }
            call = {"id": _text(item, "call_id", where), "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            call_id = _text(item, "call_id", where)
            return {"role": "tool", "tool_call_id": call_id, "content": output}
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thought = [
                part["text"]
                for part in (parts if isinstance(parts, list) else [])
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            ]
            return {
                "role": "assistant",
                "content": None,
                "reasoning_content": "\n".join(thought) or None,
            }
        case other:
            raise bad_request(
                f"{where} is of type {shown(other)}; this server accepts message, function_call, "
                "function_call_output and reasoning.",
                where,
            )


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(
            f"{where}.{name} must be a string, not {shown(value)}.", f"{where}.{name}"
        )
    return value


def _content(content: object, where: str) -> str:
    """Return the text of an item's content. Raises `ApiError`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(
            f"{where} must be a string or a list of parts, not {shown(content)}.", where
        )
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXTS:
            raise bad_request(
                f"{where}.{index} is of type {shown(kind)}; this model reads only text.",
                f"{where}.{index}",
            )
        texts.append(_text(part, _TEXTS[kind], f"{where}.{index}"))
    return "\n".join(text for text in texts if text)


def _tool(tool: ResponseTool, index: int) -> dict[str, Any]:
    if tool.type != "function" or tool.name is None:
        problem = "has no name" if tool.type == "function" else f"is of type {shown(tool.type)}"
        raise bad_request(
            f"tools.{index} {problem}; this server accepts only functions with names, which the "
            "client calls.",
            f"tools.{index}",
        )
    function = tool.model_dump(include=_OF_A_FUNCTION, exclude_none=True)
    return {"type": "function", "function": function}


_OF_A_FUNCTION = {"name", "description", "parameters", "strict"}


def _tool_choice(choice: Any) -> Any:
    """Return a choice of tools in the form of a chat request."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [
            {"type": "function", "function": {"name": each.get("name")}}
            for each in (tools if isinstance(tools, list) else [])
            if isinstance(each, dict)
        ]
        allowed = {"mode": choice.get("mode"), "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    """Return a format of the text in the form of a chat request."""
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type == "json_object":
        return {"type": "json_object"}
    schema = text.format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}
