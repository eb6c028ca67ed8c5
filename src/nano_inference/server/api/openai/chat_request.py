"""Conversion of a chat of OpenAI's to a prompt and to demanded tool calls. The text of messages
never becomes special tokens, which only the template writes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.server.api.openai.models import (
    ChatRequest,
    ChatTemplateFields,
    Message,
)
from nano_inference.server.api.parsing.tool_grammars import OfferedTool, ToolDemand
from nano_inference.server.api.shared.prompts import (
    arguments_of,
    encode_conversation,
    require_at_most,
    text_of,
)
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.errors import bad_request, shown


def chat_prompt(
    request: ChatTemplateFields, messages: Sequence[Message], served: Served
) -> list[int]:
    """Return the token ids of a chat. Raises `ApiError` and `InvalidRequest`."""
    require_at_most(len(messages), served.config.max_messages, "messages", "the number of messages")
    plain = [plain_message(message, index, served) for index, message in enumerate(messages)]
    kwargs = template_kwargs(request)
    goes_on = bool(request.continue_final_message)
    return encode_conversation(
        plain,
        served,
        tools=_tools(request),
        template_kwargs=kwargs,
        add_generation_prompt=not goes_on
        if request.add_generation_prompt is None
        else request.add_generation_prompt,
        continue_final_message=goes_on,
        documents=request.documents,
        add_special_tokens=bool(request.add_special_tokens),
        history=request.reasoning_history,
    )


def template_kwargs(request: ChatTemplateFields) -> dict[str, Any]:
    """Return the variables of the template that a request sets."""
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    if request.enable_thinking is not None:
        if kwargs.get("enable_thinking", request.enable_thinking) is not request.enable_thinking:
            raise bad_request(
                "enable_thinking contradicts chat_template_kwargs or reasoning_effort; give only "
                "one of them.",
                "enable_thinking",
            )
        kwargs["enable_thinking"] = request.enable_thinking
    return kwargs


def _tools(request: ChatTemplateFields) -> list[dict[str, Any]] | None:
    """Return the tools for the template, or None if no tool is offered or may be used."""
    names, _ = _choice_of(request)
    if not request.tools or request.tool_choice == "none":
        return None
    shows_all = not _is_allowed_tools(request.tool_choice)
    return [
        tool.model_dump(exclude_none=True)
        for tool in request.tools
        if shows_all or tool.function.name in names
    ]


def demand_of(request: ChatRequest) -> ToolDemand | None:
    """Return the tool calls that a request allows or forces. None: no tool may be called."""
    names, forced = _choice_of(request)
    offered = [
        OfferedTool(tool.function.name, tool.function.parameters, bool(tool.function.strict))
        for tool in request.tools or ()
        if tool.function.name in names
    ]
    if not offered:
        return None
    is_named = isinstance(request.tool_choice, dict) and not _is_allowed_tools(request.tool_choice)
    parallel = request.parallel_tool_calls is not False and not is_named
    return ToolDemand(offered, forced, parallel)


def _is_allowed_tools(choice: object) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"


def _choice_of(request: ChatTemplateFields) -> tuple[set[str], bool]:
    """Return the names of the tools that may be called, and if a call is forced. Raises
    `ApiError`.
    """
    choice = request.tool_choice
    known = {tool.function.name for tool in request.tools or ()}
    names, forced = known, choice == "required"
    if choice == "none" or (choice is None and not known):
        return set(), False
    if isinstance(choice, dict):
        names, forced = _named(choice)
    elif choice not in (None, "auto", "required"):
        raise bad_request(
            "tool_choice must be auto, none, required, or an object that names a function, not "
            f"{shown(choice)}.",
            "tool_choice",
        )
    if not known:
        raise bad_request("tool_choice requires tools.", "tool_choice")
    if unknown := names - known:
        raise bad_request(
            f"tool_choice names {shown(min(unknown))}, which is not among the tools.",
            "tool_choice",
        )
    return names, forced


def _named(choice: Mapping[str, Any]) -> tuple[set[str], bool]:
    """Return the names in an object `tool_choice`, and if one of them must be called."""
    if _is_allowed_tools(choice):
        allowed = choice.get("allowed_tools")
        mode, tools = (
            (allowed.get("mode"), allowed.get("tools"))
            if isinstance(allowed, dict)
            else (None, None)
        )
        listed = tools if isinstance(tools, list) else []
        functions = [tool.get("function") for tool in listed if isinstance(tool, dict)]
        names = {str(each.get("name")) for each in functions if isinstance(each, dict)}
        if mode not in ("auto", "required") or not names:
            raise bad_request(
                "tool_choice.allowed_tools must hold a mode, auto or required, and tools: a list "
                "of functions with their names.",
                "tool_choice",
            )
        return names, mode == "required"
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request(
            'tool_choice as an object must be {"type": "function", "function": {"name": ...}}, or '
            "of type allowed_tools.",
            "tool_choice",
        )
    return {name}, True


def plain_message(message: Message, index: int, served: Served) -> dict[str, Any]:
    """Return a message in the form for templates."""
    where = f"messages.{index}"
    for name in ("audio", "function_call"):
        if (message.model_extra or {}).get(name) is not None:
            raise bad_request(f"{where}.{name} is not supported by this server.", f"{where}.{name}")
    if message.content is None and message.role != "assistant":
        raise bad_request(f"{where}.content is missing.", f"{where}.content")
    text = text_of(message.content, f"{where}.content")
    plain: dict[str, Any] = {
        "role": message.role,
        "content": text or (None if message.tool_calls else ""),
    }
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(
                        call.function.arguments,
                        served,
                        f"{where}.tool_calls.{number}.function.arguments",
                    ),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return plain
