"""Grammars of requests: a table of the fields that ask for structured output, and the grammar of
forced tool calls.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.parsing import Behind, ChatFormat
from nano_inference.server.api.parsing.tool_grammars import (
    ToolDemand,
    require_carried,
    tool_grammar,
)
from nano_inference.server.api.shared.prompts import tail_of
from nano_inference.server.api.shared.protocol import Ask, Served
from nano_inference.server.errors import bad_request, shown
from nano_inference.structured.backend import backend_named
from nano_inference.structured.grammar import COMPACT, BackendName, Grammar

MOST_CHECKED = 64  # grammars that are remembered as valid

Read = Callable[[Any], Grammar | None]


def _in_notation(text: str) -> Grammar:
    """Return a grammar in llama.cpp's or Lark's notation. Only llama.cpp's has `::=`."""
    return Grammar.gbnf(text) if "::=" in text else Grammar.lark(text)


def _any_object(_: object) -> Grammar:
    return Grammar.json_object()


def _in_format(format: Mapping[str, Any]) -> Grammar | None:
    """Read an object with a `type`: OpenAI's `response_format` or Anthropic's `output_format`."""
    schema = (format.get("json_schema") or format).get("schema")
    match format["type"]:
        case "text":
            return None
        case "structural_tag":
            return Grammar.structural_tag(
                {name: value for name, value in format.items() if value is not None}
            )
        case "json_object" if schema is None:
            return Grammar.json_object()
        case kind if schema is None:
            raise InvalidRequest(f"a format of type {kind} requires a schema.")
        case _:
            return Grammar.json_schema(schema)


def _of_ollama(format: Any) -> Grammar:
    """Read Ollama's `format`: "json" or a schema."""
    if format == "json":
        return Grammar.json_object()
    if isinstance(format, Mapping):
        return Grammar.json_schema(format)
    raise InvalidRequest(f'it must be "json" or a JSON schema, not {shown(format)}.')


# field of a request -> function that makes a grammar of its value
ROWS: Mapping[str, Read] = {
    "format": _of_ollama,
    "response_format": _in_format,
    "output_format": _in_format,
    "output_config.format": _in_format,
    "structured_outputs.json": Grammar.json_schema,
    "structured_outputs.json_object": _any_object,
    "structured_outputs.regex": Grammar.regex,
    "structured_outputs.choice": Grammar.choice,
    "structured_outputs.grammar": _in_notation,
    "structured_outputs.structural_tag": Grammar.structural_tag,
    "structured_outputs_regex": Grammar.regex,
    "guided_decoding_regex": Grammar.regex,
    "guided_json": Grammar.json_schema,
    "guided_json_object": _any_object,
    "guided_regex": Grammar.regex,
    "guided_choice": Grammar.choice,
    "guided_grammar": _in_notation,
    "json_schema": Grammar.json_schema,
    "regex": Grammar.regex,
    "ebnf": _in_notation,
    "grammar": _in_notation,
    "structural_tag": Grammar.structural_tag,
}
# vLLM's names of backends; None: the engine's
_BACKENDS: Mapping[str, BackendName | None] = {
    "auto": None,
    "guidance": "llguidance",
    "llguidance": "llguidance",
    "xgrammar": "xgrammar",
    "outlines": "outlines",
}


def grammar_of(
    fields: Mapping[str, Any], within: str, behind: Behind, backend: BackendName
) -> Grammar | None:
    """Return the grammar that a request asks for, or None. The check, as far as it is possible
    without the model, may take seconds but releases the interpreter's lock.

    Args:
        fields: The request's fields, among those that `ROWS` and `_options` name.
        within: Prefix of field names in errors.
        behind: Text that precedes the grammar.
        backend: Backend of the engine.

    Raises `ApiError` 400, naming the field.
    """
    grammars: dict[str, Grammar] = {}
    for name, read in ROWS.items():
        if (value := _at(fields, name)) in (None, False, ""):
            continue
        with _naming(within + name):
            if (grammar := read(value)) is not None:
                grammars[within + name] = grammar
    if len(grammars) > 1:
        names = " and ".join(grammars)
        raise bad_request(
            f"{names} each ask for structured output; give only one.", next(iter(grammars))
        )
    for where, grammar in grammars.items():
        with _naming(where):
            if _at(fields, "structured_outputs.disable_additional_properties"):
                grammar = _without_additional_properties(grammar)
            grammar = replace(grammar, **behind._asdict(), **_options(fields, within))
            check(grammar, backend)
        return grammar
    return None


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Prefix errors with the field's name."""
    try:
        yield
    except InvalidRequest as problem:
        raise bad_request(f"{where}: {problem}", where) from None


def _at(fields: Mapping[str, Any], name: str) -> Any:
    value: Any = fields
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _options(fields: Mapping[str, Any], within: str) -> dict[str, Any]:
    """Return the options of a grammar that the request sets in other fields."""
    options: dict[str, Any] = {}
    patterns = ("structured_outputs.whitespace_pattern", "guided_whitespace_pattern")
    if (pattern := next(filter(None, (_at(fields, each) for each in patterns)), None)) is not None:
        options["whitespace"] = pattern
    if _at(fields, "structured_outputs.disable_any_whitespace"):
        options["whitespace"] = COMPACT
    if _at(fields, "structured_outputs.lenient"):
        options["lenient"] = True
    for where in ("structured_outputs.backend", "guided_decoding_backend"):
        if (name := _at(fields, where)) is None:
            continue
        known = name.split(":")[0]
        if known not in _BACKENDS:
            raise bad_request(
                f"{within}{where} must be one of {', '.join(_BACKENDS)}, not {shown(name)}.",
                within + where,
            )
        options["backend"] = _BACKENDS[known]
    return options


def _without_additional_properties(grammar: Grammar) -> Grammar:
    """Return a grammar with closed objects, as in vLLM. A grammar without schemas is unchanged."""
    if grammar.kind not in ("json", "structural_tag"):
        return grammar
    closed = _closed(json.loads(grammar.text))
    return replace(grammar, text=json.dumps(closed, ensure_ascii=False, separators=(",", ":")))


# keywords that hold schemas by name, and keywords that hold no schema
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_SCHEMA = ("enum", "const", "default", "examples")


def _closed(schema: Any) -> Any:
    """Close the objects in a schema or in a part of one: objects that declare properties and do not
    mention additional ones forbid them.
    """
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: {key: _closed(each) for key, each in value.items()}
        if name in _BY_NAME and isinstance(value, dict)
        else value
        if name in _NO_SCHEMA
        else _closed(value)
        for name, value in schema.items()
    }
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


@lru_cache(MOST_CHECKED)
def check(grammar: Grammar, backend: BackendName) -> None:
    """Raise `InvalidRequest` if a grammar cannot be enforced. `backend` is the engine's default."""
    backend_named(grammar.backend or backend).check(grammar)


# Notation for models whose own is unknown. A grammar makes any model write it, and some models
# write it without one.
_DEFAULT = "hermes"


def call_format(demand: ToolDemand | None, served: Served) -> ChatFormat:
    """Return the notation of tool calls in the answers: the model's own, or Hermes's if that is
    unknown.
    """
    format = served.chat_format
    unknown = format.tools is None and not format.in_channels
    if unknown and demand is not None and served.config.tool_format is None:
        return replace(format, tools=_DEFAULT)
    return format


def with_calls(
    asks: Sequence[Ask], demand: ToolDemand | None, served: Served, *, goes_on: bool
) -> list[Ask]:
    """Return the asks, with a grammar of tool calls if the demand needs one. If an answer may also
    be text and the request has a schema for it, the grammar includes the schema.

    Args:
        asks: Asks of the request.
        demand: Tool calls to allow or force. None: no tool may be called.
        served: Served model, with its notation.
        goes_on: True if the prompt ends with the beginning of the answer.

    Raises:
        ApiError: 400, tool calls cannot be guaranteed.
    """
    if demand is None:
        return list(asks)
    return [_with_calls(ask, demand, served, goes_on) for ask in asks]


def _with_calls(ask: Ask, demand: ToolDemand, served: Served, goes_on: bool) -> Ask:
    content, format = ask.params.grammar, call_format(demand, served)
    if format is not served.chat_format:  # the model was not trained to stop after a call
        demand = replace(demand, parallel=False)
    try:
        require_carried(demand, format)
    except InvalidRequest as problem:
        raise bad_request(f"tools: {problem}", "tools") from None
    if not demand.forced:
        no_calls = served.chat_format.tools is None  # its answers are only text
        if no_calls or (content is None and not any(tool.strict for tool in demand.tools)):
            return ask
    if content is not None and content.kind != "json":
        if not demand.forced:
            return ask
        raise bad_request(
            f"tool_choice forces a tool call, but the request has a {content.kind} grammar as "
            "well; give only one.",
            "tool_choice",
        )
    assert served.tokenizer is not None
    try:
        grammar = tool_grammar(
            demand,
            format,
            served.tokenizer,
            prompt_tail=tail_of(ask.prompt, served),
            goes_on=goes_on,
            content=content,
        )
        check(grammar, served.engine.grammar_backend)
    except InvalidRequest as problem:
        name = "tool_choice" if format.tools is None else "tools"
        raise bad_request(f"{name}: {problem}", name) from None
    return replace(ask, params=replace(ask.params, grammar=grammar))
