"""Conversion of a request of the Responses API to the equivalent chat request."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nano_inference.server.api.openai.models import ChatRequest
from nano_inference.server.api.openai.responses_models import (
    INCLUDABLE,
    LOGPROBS,
    ChatMessage,
    Item,
    ResponsesRequest,
    TextConfig,
)
from nano_inference.server.api.openai.responses_reasoning import Seal
from nano_inference.server.api.openai.responses_tools import (
    CALLS,
    FORMS,
    INPUT,
    Offers,
    allowed_names,
    chosen_name,
    completed,
    forced_names,
    in_order,
    qualified,
)
from nano_inference.server.api.shared.fields import (
    SamplingFields,
    validated,
)
from nano_inference.server.errors import bad_request, shown

_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its field


def chat_request(
    request: ResponsesRequest, messages: Sequence[ChatMessage], offers: Offers
) -> ChatRequest:
    """Return the equivalent chat request.

    Args:
        request: Request of the Responses API.
        messages: The conversation, without instructions.
        offers: Tools that the model sees.

    Raises:
        ApiError: 400, the request has unsupported parts.
    """
    messages = list(messages)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    includes_logprobs = LOGPROBS in (request.include or ())
    fields = request.model_dump(include=_SHARED, by_alias=True, exclude_none=True) | {
        "messages": _with_one_beginning(messages),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": includes_logprobs,
        "top_logprobs": request.top_logprobs if includes_logprobs else None,
        "tools": _tools(request, offers) or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "response_format": _format(request.text),
        "chat_template_kwargs": _template_variables(request),
    }
    return validated(ChatRequest, {name: each for name, each in fields.items() if each is not None})


def _tools(request: ResponsesRequest, offers: Offers) -> list[dict[str, Any]]:
    """Return the tools for the template. A tool that the conversation adds is among them only if a
    call may be forced.
    """
    forces = forced_names(request.tool_choice) != ()
    return [
        {"type": "function", "function": each.function}
        for each in offers.values()
        if forces or not each.is_late
    ]


def check_include(include: Sequence[str] | None) -> None:
    """Raise `ApiError` 400 if a value of `include` is unknown."""
    if unknown := set(include or ()) - set(INCLUDABLE):
        raise bad_request(
            f"include holds {shown(min(unknown))}; the known values are {', '.join(INCLUDABLE)}.",
            "include",
        )


def _template_variables(request: ResponsesRequest) -> dict[str, Any] | None:
    verbosity = None if request.text is None else request.text.verbosity
    if verbosity is None:
        return request.chat_template_kwargs
    return {"verbosity": verbosity} | (request.chat_template_kwargs or {})


_SHARED = {
    *SamplingFields.model_fields,
    *("model", "temperature", "stream", "parallel_tool_calls", "prompt_cache_retention"),
    *("enable_thinking", "reasoning_history"),
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


class Reader:
    """Reader of a conversation's items.

    Args:
        seal: Opens reasoning that comes back.
        owner: Client that sends the items.
    """

    def __init__(self, seal: Seal, owner: str) -> None:
        self._seal, self._owner = seal, owner

    def messages(self, value: object) -> list[ChatMessage]:
        """Return the messages of an input. Consecutive items of the assistant become one message.
        Raises `ApiError`.
        """
        return joined(
            self._message(item, f"input.{index}") for index, item in enumerate(items_of(value))
        )

    def _message(self, item: Item, where: str) -> ChatMessage:
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind in CALLS:
            return _call(item, CALLS[kind], where)
        match kind:
            case "message":
                role = _text(item, "role", where)
                return {"role": role, "content": _content(item.get("content"), f"{where}.content")}
            case str() if (read := OUTPUTS.get(kind)) is not None:
                # the id of a local shell's output is that of the call
                name = "call_id" if kind != "local_shell_call_output" or "call_id" in item else "id"
                return {
                    "role": "tool",
                    "tool_call_id": _text(item, name, where),
                    "content": read(item, where),
                }
            case "reasoning":
                thought = self._thought(item, where) or None
                return {"role": "assistant", "content": None, "reasoning_content": thought}
            case "additional_tools":
                tools = f"More tools:\n{_found_tools(item, where)}"
                return {"role": "developer", "content": tools}
            case other:
                raise bad_request(
                    f"{where} is of type {shown(other)}; this server accepts message, reasoning, "
                    f"additional_tools, {', '.join((*CALLS, *OUTPUTS))}.",
                    where,
                )

    def _thought(self, item: Item, where: str) -> str:
        if (sealed := item.get("encrypted_content")) is not None:
            where = f"{where}.encrypted_content"
            opened = self._seal.open(sealed, self._owner) if isinstance(sealed, str) else None
            if opened is None:
                raise bad_request(
                    f"{where} is damaged, or was not made by this server for this client; leave "
                    "the item out.",
                    where,
                    "invalid_encrypted_content",
                )
            return opened
        parts = item.get("content") or item.get("summary") or []
        return "\n".join(
            part["text"]
            for part in (parts if isinstance(parts, list) else [])
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )


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


def _call(item: Item, kind: str, where: str) -> ChatMessage:
    """Return the message of a call. Arguments that were cut off are completed."""
    form = FORMS[kind]
    if form.text:
        name = qualified(_text(item, "name", where), item.get("namespace"))
        text = _text(item, form.text, where)
        arguments = completed(text) if kind == "function" else _json({INPUT: text})
    else:
        name, arguments = kind, _json(in_order(form, form.arguments(item)))
    call = {
        "id": _text(item, "call_id", where),
        "function": {"name": name, "arguments": arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain_output(item: Item, where: str) -> str:
    return _content(item.get("output"), f"{where}.output")


def _shell_output(item: Item, where: str) -> str:
    """Return the output of a shell's commands as JSON."""
    output = item.get("output")
    if isinstance(output, str):
        return output
    if not isinstance(output, list) or not all(isinstance(each, dict) for each in output):
        raise bad_request(
            f"{where}.output must be a list of the commands' outputs, not {shown(output)}.",
            f"{where}.output",
        )
    names = ("stdout", "stderr", "outcome")
    return _json([{name: each.get(name) for name in names} for each in output])


def _patch_output(item: Item, where: str) -> str:
    status, output = _text(item, "status", where), item.get("output")
    said = f": {output}" if isinstance(output, str) and output else ""
    return f"{status}{said}"


def _found_tools(item: Item, _: str) -> str:
    tools = item.get("tools")
    return _json(tools if isinstance(tools, list) else [])


# type of an item with a call's output -> function that makes its text
OUTPUTS: Mapping[str, Callable[[Item, str], str]] = {
    "function_call_output": _plain_output,
    "custom_tool_call_output": _plain_output,
    "local_shell_call_output": _plain_output,
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
    "tool_search_output": _found_tools,
}


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


def _tool_choice(choice: Any) -> Any:
    """Return a choice of tools in the form of a chat request."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        named = [_function(name) for name in allowed_names(choice)]
        allowed = {"mode": choice.get("mode"), "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _function(chosen_name(choice))


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    """Return a format of the text in the form of a chat request."""
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type == "json_object":
        return {"type": "json_object"}
    schema = text.format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}
