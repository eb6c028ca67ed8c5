"""Tool calls as a model of each format writes them, by the row of the format."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.server.api.parsing.tool_formats import (
    TOOL_FORMATS,
    JsonArguments,
    KeywordArguments,
    NamedCall,
    Notation,
    ObjectCall,
    TaggedArguments,
    ToolFormat,
)

Arguments = Mapping[str, Any]


def rendered(name: str, calls: Sequence[tuple[str, Arguments]]) -> str:
    """Write a section of calls."""
    form = TOOL_FORMATS[name]
    texts = [_call(form, called, arguments, at) for at, (called, arguments) in enumerate(calls)]
    return form.begin + form.opening + form.joint.join(texts) + form.closing


def _call(form: ToolFormat, name: str, arguments: Arguments, index: int) -> str:
    call = form.call
    if isinstance(call, ObjectCall):
        return _json({"name": name, call.arguments: arguments})
    number = f":{index}" if call.numbered else ""
    head = call.before + call.prefix + name + number + call.after
    return head + _arguments(call, arguments) + call.close


def _arguments(call: NamedCall, arguments: Arguments) -> str:
    match call.arguments:
        case JsonArguments(fenced=fenced):
            return f"\n```json\n{_json(arguments)}\n```" if fenced else _json(arguments)
        case TaggedArguments() as tags:
            return tags.gap + "".join(
                _tagged(tags, key, value) + tags.gap for key, value in arguments.items()
            )
        case KeywordArguments() as keywords:
            gap = "," + keywords.notation.gap
            return gap.join(
                f"{key}{keywords.assign}{literal(value, keywords.notation)}"
                for key, value in arguments.items()
            )


def _tagged(tags: TaggedArguments, key: str, value: object) -> str:
    line = "\n" if tags.lines else ""
    kind = tags.typed[not isinstance(value, str)] if tags.typed else ""
    text = value if isinstance(value, str) else _json(value)
    between = tags.gap if tags.value else ""
    return f"{tags.key}{key}{tags.key_end}{kind}{between}{tags.value}{line}{text}{line}{tags.end}"


def literal(value: Any, notation: Notation) -> str:
    """Write a literal."""
    if isinstance(value, str):
        quote = notation.quotes[0]
        return repr(value) if notation.escapes else f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        members = (
            f"{literal(key, notation)}:{notation.gap}{literal(each, notation)}"
            for key, each in value.items()
        )
        return "{" + f",{notation.gap}".join(members) + "}"
    if isinstance(value, list):
        return "[" + f",{notation.gap}".join(literal(each, notation) for each in value) + "]"
    words = {True: notation.true, False: notation.false, None: notation.null}
    return words[value] if value is None or isinstance(value, bool) else json.dumps(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
