"""Tools of the Responses API. The model sees each one as a function, and its call is answered as an
item of the tool's type.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic_core import from_json

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.openai.responses_grammars import pattern_of
from nano_inference.server.api.openai.responses_models import Item, PlainTool, ResponseTool
from nano_inference.server.api.shared.fields import check_part, validated
from nano_inference.server.errors import bad_request, shown

log = logging.getLogger("nano_inference.server")

INPUT = "input"  # argument of a custom tool
_STRING, _INTEGER = {"type": "string"}, {"type": "integer", "minimum": 0}
_STRINGS = {"type": "array", "items": _STRING, "minItems": 1}
_OPERATIONS = ("create_file", "update_file", "delete_file")


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


@dataclass(frozen=True)
class Form:
    """How the calls of one type of tool are written.

    Attributes:
        call: Type of a call's item.
        prefix: Prefix of the item's id.
        text: Field of the item that holds the call's text and is streamed. "": the item is sent as
            a whole.
        event: Prefix of the events of that text.
        description, parameters: The function that the model sees, if the client does not describe
            it.
        fields: Makes the item's fields from the arguments. None: they do not fit the type.
        arguments: Makes the arguments from an item.
    """

    call: str
    prefix: str
    text: str = ""
    event: str = ""
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    fields: Callable[[Mapping[str, Any]], Item | None] = lambda _: None
    arguments: Callable[[Item], Any] = lambda _: {}


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _local_shell(called: Mapping[str, Any]) -> Item | None:
    command, env = called.get("command"), called.get("env")
    if not _is_strings(command):
        return None
    directory = called.get("working_directory")
    action = {
        "type": "exec",
        "command": command,
        "env": {key: str(value) for key, value in env.items()} if isinstance(env, dict) else {},
        "timeout_ms": _whole(called.get("timeout_ms")),
        "user": None,
        "working_directory": directory if isinstance(directory, str) else None,
    }
    return {"action": action}


def _shell(called: Mapping[str, Any]) -> Item | None:
    if not _is_strings(called.get("commands")):
        return None
    action = {
        "commands": called["commands"],
        "max_output_length": _whole(called.get("max_output_length")),
        "timeout_ms": _whole(called.get("timeout_ms")),
    }
    return {"action": action, "environment": None}


def _patch(called: Mapping[str, Any]) -> Item | None:
    kind, path, diff = (called.get(name) for name in ("type", "path", "diff"))
    if kind not in _OPERATIONS or not isinstance(path, str):
        return None
    if kind == "delete_file":
        return {"operation": {"type": kind, "path": path}}
    if not isinstance(diff, str):
        return None
    return {"operation": {"type": kind, "path": path, "diff": diff}}


def _without_nulls(value: Any) -> dict[str, Any]:
    fields = value if isinstance(value, dict) else {}
    return {name: each for name, each in fields.items() if each is not None}


def _action(item: Item) -> dict[str, Any]:
    fields = _without_nulls(item.get("action"))
    return {name: each for name, each in fields.items() if name != "type" and each != {}}


FORMS: Mapping[str, Form] = {
    "function": Form("function_call", "fc", "arguments", "response.function_call_arguments"),
    "custom": Form(
        "custom_tool_call",
        "ctc",
        "input",
        "response.custom_tool_call_input",
        parameters=_object(INPUT, input=_STRING),
    ),
    "local_shell": Form(
        "local_shell_call",
        "lsh",
        description="Run a command on the user's machine.",
        parameters=_object(
            "command",
            command=_STRINGS | {"description": "The program and its arguments."},
            working_directory=_STRING,
            timeout_ms=_INTEGER,
            env={"type": "object", "additionalProperties": _STRING},
        ),
        fields=_local_shell,
        arguments=_action,
    ),
    "shell": Form(
        "shell_call",
        "sh",
        description="Run shell commands on the user's machine, one after the other.",
        parameters=_object(
            "commands", commands=_STRINGS, timeout_ms=_INTEGER, max_output_length=_INTEGER
        ),
        fields=_shell,
        arguments=_action,
    ),
    "apply_patch": Form(
        "apply_patch_call",
        "apc",
        description="Create, update or delete a file. `diff` holds the change, in the V4A format.",
        parameters=_object(
            "type", "path", type={"enum": list(_OPERATIONS)}, path=_STRING, diff=_STRING
        ),
        fields=_patch,
        arguments=lambda item: _without_nulls(item.get("operation")),
    ),
    "tool_search": Form(
        "tool_search_call",
        "tsc",
        description="Search for more tools.",
        parameters=_object("query", query=_STRING),
        fields=lambda called: {"arguments": dict(called), "execution": "client"},
        arguments=lambda item: _without_nulls(item.get("arguments")),
    ),
}


def in_order(form: Form, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments in the order of the function's parameters, since clients change it."""
    names = (form.parameters or {}).get("properties", {})
    return {name: arguments[name] for name in names if name in arguments} | arguments


CALLS: Mapping[str, str] = {form.call: kind for kind, form in FORMS.items()}  # item -> tool
_SEARCHES = (
    *("web_search", "web_search_2025_08_26"),
    *("web_search_preview", "web_search_preview_2025_03_11"),
)


@dataclass(frozen=True)
class Offered:
    """A tool of a request.

    Attributes:
        type: Type of the tool, a key of `FORMS`.
        name: Name in items.
        namespace: Namespace in items. "": none.
        function: The function that the model sees.
        is_late: True if an item of the conversation adds it. The template does not render it with
            the other tools, so that the prompt keeps its beginning.
    """

    type: str
    name: str
    namespace: str
    function: Mapping[str, Any]
    is_late: bool = False

    @property
    def form(self) -> Form:
        """How its calls are written."""
        return FORMS[self.type]


Offers = Mapping[str, Offered]  # by the function's name


def qualified(name: str, namespace: object) -> str:
    """Return the name by which the model calls a tool."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def offered_tools(
    tools: Sequence[ResponseTool], items: Iterable[Item], forced: Collection[str] | None
) -> Offers:
    """Return the tools that the model sees, by the names of their functions.

    A web search next to other tools is left out: clients offer one by default, and no model has to
    use it.

    Args:
        tools: Tools of the request.
        items: Items of the conversation, some of which may add tools.
        forced: Names of the tools one of which must be called. None: all. Empty: no call is forced.

    Raises:
        ApiError: 400, a tool is unknown, malformed, or one that a server would have to run.
    """
    offers: dict[str, Offered] = {}
    places: dict[str, str] = {}
    for tool, namespace, where in _visible(tools):
        offered = _offered(tool, namespace, where, forced)
        name = offered.function["name"]
        if name in offers:
            raise bad_request(
                f"{where} has the name {shown(name)}, like {places[name]}; give each tool its own.",
                where,
            )
        offers[name], places[name] = offered, where
    for tool, namespace, where in _added(items):
        offered = _offered(tool, namespace, where, forced)
        offers.setdefault(offered.function["name"], replace(offered, is_late=True))
    return offers


def _visible(tools: Sequence[ResponseTool]) -> Iterator[tuple[PlainTool, str, str]]:
    has_others = any(tool.type not in _SEARCHES for tool in tools)
    has_search = any(tool.type == "tool_search" for tool in tools)
    for tool, namespace, where in _flat(tools, "tools"):
        if tool.type in _SEARCHES and has_others:
            _say_once(tool.type)
        elif tool.defer_loading and not has_search:
            raise bad_request(
                f"{where}.defer_loading requires a tool of type tool_search.",
                f"{where}.defer_loading",
            )
        elif not tool.defer_loading:
            yield tool, namespace, where


def _added(items: Iterable[Item]) -> Iterator[tuple[PlainTool, str, str]]:
    """Yield the tools that items of the conversation add."""
    for index, item in enumerate(items):
        if item.get("type") not in ("additional_tools", "tool_search_output"):
            continue
        where, tools = f"input.{index}.tools", item.get("tools")
        if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
            raise bad_request(f"{where} must be a list of tools, not {shown(tools)}.", where)
        yield from _flat([validated(ResponseTool, tool) for tool in tools], where)


@cache
def _say_once(kind: str) -> None:
    log.warning("a request offers %s, which this server does not have: models do not see it.", kind)


def shown_tools(tools: Sequence[ResponseTool], offers: Offers) -> list[dict[str, Any]]:
    """Return the tools for the response: without those that the model never sees."""
    kinds = {each.type for each in offers.values()} | {"namespace"}
    return [_shown(tool) for tool in tools if tool.type in kinds]


def _shown(tool: ResponseTool) -> dict[str, Any]:
    plain = tool.model_dump(by_alias=True, exclude_none=True)
    if tool.type == "function":
        return {"parameters": None, "strict": None} | plain
    return {"description": ""} | plain if tool.type == "namespace" else plain


def _flat(tools: Sequence[ResponseTool], within: str) -> Iterator[tuple[PlainTool, str, str]]:
    """Yield tools, their namespaces and their places, with namespaces taken apart."""
    for index, tool in enumerate(tools):
        where = f"{within}.{index}"
        check_part(tool, where)
        if tool.type != "namespace":
            yield tool, "", where
            continue
        name = _name(tool, where)
        if not tool.tools:
            raise bad_request(f"{where}.tools must list at least one tool.", f"{where}.tools")
        for number, inner in enumerate(tool.tools):
            inner_where = f"{where}.tools.{number}"
            check_part(inner, inner_where)
            if inner.type not in ("function", "custom"):
                raise bad_request(
                    f"{inner_where} is of type {shown(inner.type)}; a namespace holds functions "
                    "and custom tools.",
                    inner_where,
                )
            yield inner, name, inner_where


def _name(tool: PlainTool, where: str) -> str:
    if tool.name is None:
        raise bad_request(f"{where} has no name; give one.", where)
    return tool.name


def _offered(
    tool: PlainTool, namespace: str, where: str, forced: Collection[str] | None
) -> Offered:
    form = FORMS.get(tool.type)
    if form is None:
        raise bad_request(
            f"{where} is of type {shown(tool.type)}, which a server would have to run; this server "
            f"accepts tools that the client runs: {', '.join(FORMS)}, namespace.",
            where,
        )
    _require_client(tool, where)
    name = _name(tool, where) if form.text else tool.type
    full = qualified(name, namespace)
    function: dict[str, Any] = {
        "name": full,
        "description": tool.description or form.description or None,
        "parameters": form.parameters if tool.parameters is None else tool.parameters,
        "strict": tool.strict,
    }
    if tool.type == "custom":
        must = forced is None or full in forced
        function |= _custom(tool, where, enforced=must)
    return Offered(
        tool.type,
        name,
        namespace,
        {key: value for key, value in function.items() if value is not None},
    )


def _require_client(tool: PlainTool, where: str) -> None:
    """Reject the variants of tools that a server would run."""
    environment = (tool.environment or {}).get("type", "local")
    if tool.type == "shell" and environment != "local":
        raise bad_request(
            f"{where}.environment is of type {shown(environment)}, which a server would have to "
            "run; this server accepts only local.",
            f"{where}.environment",
        )
    if tool.type == "tool_search" and tool.execution != "client":
        raise bad_request(
            f"{where} is a tool_search that a server would have to run; this server accepts only "
            'execution "client".',
            where,
        )


def _custom(tool: PlainTool, where: str, *, enforced: bool) -> dict[str, Any]:
    """Return the parts of a custom tool's function that its format determines."""
    format_ = tool.format
    if format_ is None or format_.type == "text":
        return {}
    where = f"{where}.format"
    if format_.type != "grammar" or format_.syntax not in ("lark", "regex"):
        raise bad_request(
            f"{where} must be of type text, or of type grammar with the syntax lark or regex.",
            where,
        )
    if not format_.definition:
        raise bad_request(f"{where}.definition is missing.", f"{where}.definition")
    described = (
        f"{tool.description or ''}\n\nThe input must match this {format_.syntax} grammar:\n"
        f"{format_.definition}"
    ).strip()
    text: dict[str, Any] = {"type": "string"}
    if enforced:
        try:
            text["pattern"] = pattern_of(format_.syntax, format_.definition)
        except InvalidRequest as problem:
            raise bad_request(f"{where}.definition: {problem}", f"{where}.definition") from None
    parameters = _object(INPUT, input=text)
    return {"description": described, "parameters": parameters, "strict": enforced or None}


def forced_names(choice: Any) -> Collection[str] | None:
    """Return the names of the tools one of which must be called. None: all. Empty: none must."""
    if choice == "required":
        return None
    if not isinstance(choice, dict):
        return ()
    if choice.get("type") != "allowed_tools":
        return {chosen_name(choice)}
    return set(allowed_names(choice)) if choice.get("mode") == "required" else ()


def allowed_names(choice: Mapping[str, Any]) -> list[str]:
    """Return the names in a choice of type `allowed_tools`."""
    tools = choice.get("tools")
    listed = tools if isinstance(tools, list) else []
    return [chosen_name(each) for each in listed if isinstance(each, dict)]


def chosen_name(choice: Mapping[str, Any]) -> str:
    """Return the function's name of the tool that a choice names. Raises `ApiError`."""
    kind, name = choice.get("type"), choice.get("name")
    if not isinstance(kind, str) or kind not in FORMS:
        raise bad_request(
            f"tool_choice names {shown(kind)}; it must be auto, none, required, allowed_tools, or "
            f"a tool of type {', '.join(FORMS)}.",
            "tool_choice",
        )
    if not FORMS[kind].text:
        return kind
    if not isinstance(name, str):
        raise bad_request("tool_choice must hold the name of the tool.", "tool_choice")
    return qualified(name, choice.get("namespace"))


# -- calls -----------------------------------------------------------------------------------------


def object_of(arguments: str) -> dict[str, Any] | None:
    """Return the arguments of a call. None: they are not the JSON text of an object."""
    try:
        value = from_json(arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def completed(arguments: str) -> str:
    """Return arguments that were cut off as valid JSON. Others are unchanged."""
    try:
        from_json(arguments)
    except ValueError:
        try:
            partial = from_json(arguments or "{}", allow_partial=True)
        except ValueError:
            return arguments
        return json.dumps(partial, ensure_ascii=False) if isinstance(partial, dict) else arguments
    return arguments


_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# text of a JSON string up to its end, without an escape that is not complete
_INSIDE = re.compile(
    r'(?:[^"\\]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt])*'
)


class InputText:
    """Decoder of a custom tool's input, while the JSON text of its arguments arrives."""

    def __init__(self) -> None:
        self._json = ""  # without the decoded part
        self._begun = False
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """The input so far."""
        return "".join(self._text)

    def push(self, more: str) -> str:
        """Return the new part of the input."""
        self._json += more
        if not self._begun:
            head = _HEAD.match(self._json)
            if head is None:
                return ""
            self._begun, self._json = True, self._json[head.end() :]
        match = _INSIDE.match(self._json)
        assert match is not None
        self._json = self._json[match.end() :]
        return self._said(json.loads(f'"{match[0]}"', strict=False))

    def finish(self) -> str:
        """Return the rest of the input. Arguments of another shape are the input themselves, or the
        only text in them.
        """
        if self._begun or not self._json:
            return ""
        try:
            value = from_json(self._json)
        except ValueError:
            return self._said(self._json)
        if isinstance(value, dict):
            value = value.get(INPUT, next(iter(value.values())) if len(value) == 1 else None)
        return self._said(value if isinstance(value, str) else self._json)

    def _said(self, text: str) -> str:
        if text:
            self._text.append(text)
        return text
