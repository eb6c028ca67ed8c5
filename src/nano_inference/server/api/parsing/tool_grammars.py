"""Grammars of tool calls. The parsers read text drawn under them as valid calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.parsing.formats import ChatFormat, reasoning_before
from nano_inference.server.api.parsing.harmony_grammars import harmony_lines
from nano_inference.server.api.parsing.literals import is_bare_key
from nano_inference.server.api.parsing.tool_formats import (
    NAME,
    TOOL_FORMATS,
    JsonArguments,
    KeywordArguments,
    NamedCall,
    ObjectCall,
    TaggedArguments,
)
from nano_inference.server.api.parsing.tool_parsers import MOST_KEY, Schemas
from nano_inference.server.api.parsing.typed_values import TEXT, kinds_of
from nano_inference.server.api.parsing.value_grammars import ValueRules, regex_of
from nano_inference.structured.grammar import BOUNDED, Grammar
from nano_inference.structured.structural_tag import ANYTHING, literal, schema_part
from nano_inference.text.tokenizer import Tokenizer

_FENCE, _END_OF_FENCE = "\n```json\n", "\n```"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that may be called.

    Attributes:
        name: Name of the function.
        parameters: JSON schema of its arguments. None: it has none.
        strict: Reject keywords of the schema that cannot be enforced. False: ignore them.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolDemand:
    """Rules for tool calls in an answer.

    Attributes:
        tools: Tools that may be called.
        forced: The answer is a call. False: it may be text, or have text before a call.
        parallel: Several calls may follow each other.
    """

    tools: Sequence[OfferedTool]
    forced: bool
    parallel: bool = True

    @property
    def schemas(self) -> Schemas:
        """Schemas of the tools' arguments, by name."""
        return {tool.name: tool.parameters for tool in self.tools}


def tool_grammar(
    demand: ToolDemand,
    format: ChatFormat,
    tokenizer: Tokenizer,
    *,
    prompt_tail: str,
    goes_on: bool = False,
    content: Grammar | None = None,
) -> Grammar:
    """Return the grammar of an answer. Nothing follows the calls.

    Args:
        demand: Tool calls to allow or force.
        format: Notation of the model.
        tokenizer: Tokenizer. A marker that is one of its added tokens is written as that token.
        prompt_tail: End of the prompt, as in `make_parser`.
        goes_on: True if the prompt ends with the beginning of the answer, after its reasoning.
        content: Grammar, of JSON, of an answer without calls. Calls then need their marker. None:
            any text.

    Raises:
        InvalidRequest: Calls in this format cannot be forced, or a tool's parameters are not those
            of an object.
    """
    if format.tools is None:
        raise InvalidRequest(
            "this model's notation of tool calls is unknown, so calls cannot be forced; start the "
            f"server with --tool-format: {', '.join(TOOL_FORMATS)}."
        )
    if format.in_channels:
        return _in_channels(demand, tokenizer, prompt_tail, content)
    require_carried(demand, format)
    rules = _Rules(format.tools, tokenizer)
    behind = reasoning_before(
        format, prompt_tail=prompt_tail, goes_on=goes_on, hidden=rules.special
    )
    if behind.opened_by:
        rules.keep_from_beginning(behind.opened_by[0])
    answers = rules.answers(demand, content)
    lines = [f"start: {answers}", *rules.lines]
    return replace(_grammar(lines, demand, content), **behind._asdict())


def _grammar(lines: Sequence[str], demand: ToolDemand, content: Grammar | None) -> Grammar:
    lenient = not all(tool.strict for tool in demand.tools)
    if content is not None and not demand.forced:
        lenient |= content.lenient
    text = "\n".join(["%llguidance {}", *lines, ""])
    return Grammar("lark", text, lenient=lenient, backend="llguidance")


def _in_channels(
    demand: ToolDemand, tokenizer: Tokenizer, prompt_tail: str, content: Grammar | None
) -> Grammar:
    """Return the grammar of an answer in harmony."""
    added = tokenizer.backend.get_added_tokens_decoder()
    calls = [
        (tool.name, schema_part(_arguments(tool), _options(BOUNDED, lenient=not tool.strict)))
        for tool in demand.tools
    ]
    final = None if demand.forced else "TEXT"
    if content is not None and not demand.forced:
        options = _options(content.whitespace, lenient=content.lenient)
        final = schema_part(json.loads(content.text), options)
    ids = {token.content: token_id for token_id, token in added.items()}
    return _grammar(harmony_lines(calls, final, ids, prompt_tail), demand, content)


def require_carried(demand: ToolDemand, format: ChatFormat) -> None:
    """Raise `InvalidRequest` if the model's notation cannot carry a tool's name or parameters."""
    row = TOOL_FORMATS.get(format.tools or "")
    form = row.call if row is not None else None
    if not isinstance(form, NamedCall):
        return
    for tool in demand.tools:
        if not NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"calls in the format {format.tools} cannot carry the name {tool.name!r} of a "
                "tool; use letters, digits, - and _."
            )
        for name in (tool.parameters or {}).get("properties") or ():
            if not _carries(form, name):
                raise InvalidRequest(
                    f"calls in the format {format.tools} cannot carry the parameter {name!r} of "
                    f"tool {tool.name!r}; use letters, digits and _."
                )


def _carries(form: NamedCall, name: str) -> bool:
    """Return True if a call can carry a parameter of this name."""
    match form.arguments:
        case TaggedArguments() as tags:
            is_plain = name == name.strip() and 0 < len(name) <= MOST_KEY
            return is_plain and not any(
                each in name for each in (tags.key, tags.key_end, "\n") if each
            )
        case KeywordArguments() as keywords if keywords.notation.escapes:
            return is_bare_key(name)
        case KeywordArguments() as keywords:
            return not any(quote in name for quote in keywords.notation.quotes)
        case JsonArguments():
            return True


class _Rules:
    """Rules of Lark for one format and one tokenizer.

    Attributes:
        special: Special tokens. The parsers see the text of those that are markers of calls.
        lines: Lines of the grammar.
    """

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        self._ids = {token.content: token_id for token_id, token in added.items()}
        self.special = {token.content for token in added.values() if token.special}
        self._name, self._format = name, TOOL_FORMATS[name]
        self._not_first = ""  # characters with which text may not begin
        self.lines = ["SPACE: /[ \\t\\r\\n]{1,4}/"]

    def keep_from_beginning(self, character: str) -> None:
        """Forbid text to begin with this character if calls may begin without a marker."""
        self._not_first += character

    def answers(self, demand: ToolDemand, content: Grammar | None) -> str:
        """Return the alternatives of an answer."""
        form, calls = self._format, self._calls(demand)
        begin, bare = form.begin, form.bare
        is_written_bare = bool(bare) and bare == (form.opener or "{")
        marked = f'SPACE? {self._written(begin)} " "? {calls}'
        at_once = f"{self._bare_opening()} some_calls | {marked}" if is_written_bare else marked
        if demand.forced:
            return at_once
        if content is not None:
            options = _options(content.whitespace, lenient=content.lenient)
            schema = schema_part(json.loads(content.text), options)
            self.lines += [f"content: {schema}"]
            return f"{marked} | SPACE? content"
        text = self._free() if bare else ANYTHING
        if begin in self.special:  # its letters are a marker, too
            text += f" & ~/(.|\\n)*{regex_of(begin)}(.|\\n)*/"
        self.lines += [f"TEXT: {text}"]
        later = f'({self._until("text_until", "TEXT", text, begin)}) " "? {calls}'
        return f"TEXT | {later} | {at_once}" if is_written_bare else f"TEXT | {later}"

    def _free(self) -> str:
        """Return a terminal for text that the parser does not read as calls without a marker."""
        space, form = r" \t\r\n", self._format
        if form.bare not in ("{", "["):
            first = f" & ~/[{regex_of(self._not_first)}](.|\\n)*/" if self._not_first else ""
            return f"{ANYTHING} & ~/[{space}]*{regex_of(form.bare)}(.|\\n)*/{first}"
        first = f"[^{space}{re.escape(form.bare + self._not_first)}]"
        if form.opener and isinstance(form.call, ObjectCall):
            first = rf"({first}|{re.escape(form.opener)}[{space}]*[^{space}{{])"
        return rf"/[{space}]*({first}(.|\n)*)?/"

    def _bare_opening(self) -> str:
        """Return the opening of calls without a marker, including the space before it, because text
        may begin with both and the longest match wins.
        """
        opening = self._format.opening
        if not opening:
            return "SPACE?"
        self.lines += [f"OPENING: /[ \\t\\r\\n]{{0,4}}{re.escape(opening)}/"]
        return "OPENING"

    def _calls(self, demand: ToolDemand) -> str:
        """Return a rule of calls, after the marker that opens them."""
        form = self._format
        for number, tool in enumerate(demand.tools):
            options = _options(BOUNDED, lenient=not tool.strict)
            if isinstance(form.call, ObjectCall):
                name = json.dumps(tool.name, ensure_ascii=False)
                head = f'{{"name": {name}, "{form.call.arguments}": '
                schema = schema_part(_arguments(tool), options)
                body = f"{literal(head)} {schema} {literal('}')}"
            else:
                body = self._named(form.call, tool, f"call_{number}", options)
            self.lines += [f"call_{number}: {body}"]
        more = f" ({self._written(form.joint)} call)*" if demand.parallel else ""
        self.lines += [
            f"call: {' | '.join(f'call_{number}' for number in range(len(demand.tools)))}",
            f"some_calls: call{more} {self._written(form.closing)}",
            f"calls: {self._written(form.opening)} some_calls",
        ]
        return "calls"

    def _named(
        self, form: NamedCall, tool: OfferedTool, prefix: str, options: Mapping[str, Any]
    ) -> str:
        """Return a call whose name precedes its arguments."""
        root = _arguments(tool)
        number = ""
        if form.numbered:
            self.lines += [f"{prefix.upper()}_NUMBER: /[0-9]{{1,3}}/"]
            number = f'":" {prefix.upper()}_NUMBER'
        head = f"{self._written(form.before + form.prefix + tool.name)} {number}"
        head, close = f"{head} {self._written(form.after)}", self._written(form.close)
        if isinstance(form.arguments, JsonArguments):
            body = schema_part(root, options)
            if form.arguments.fenced:
                body = f"{literal(_FENCE)} {body} {literal(_END_OF_FENCE)}"
            return f"{head} {body} {close}"
        values = ValueRules(
            self.lines,
            root,
            prefix,
            strict=tool.strict,
            options=options,
            write=self._written,
            is_token=self.special.__contains__,
        )
        properties, required, others = values.properties()
        if isinstance(form.arguments, KeywordArguments):
            notation = form.arguments.notation
            keys = (form.arguments.assign, True)
            members = values.members(properties, required, others, notation, keys)
            return f"{head} {members} {close}"
        return f"{head} {self._tags(form.arguments, values, prefix)} {close}"

    def _tags(self, tags: TaggedArguments, values: ValueRules, prefix: str) -> str:
        """Return the parameters of a call, between their markers, in the order of the schema."""
        gap = f"{literal(tags.gap)}?" if tags.gap else ""
        properties, required, others = values.properties()
        parts = list[str]()
        for name, schema in properties.items():
            one = self._tag(tags, literal(name), schema, values)
            parts.append(f"({gap} {one}){'' if name in required else '?'}")
        if not properties and others is not False:
            self.lines += [f"{prefix.upper()}_KEY: /[A-Za-z0-9_]{{1,64}}/"]
            schema = {} if others is True else others
            one = self._tag(tags, f"{prefix.upper()}_KEY", schema, values)
            parts.append(f"({gap} {one})*")
        return f"{' '.join(parts)} {gap}"

    def _tag(self, tags: TaggedArguments, name: str, schema: Any, values: ValueRules) -> str:
        """Return a key and its value."""
        line = "\n" if tags.lines else ""
        key = f"{self._written(tags.key)} {name} {self._written(tags.key_end)}"
        if tags.value:
            key += f" {literal(tags.gap)}? {self._written(tags.value)}"
        end = line + tags.end
        if tags.typed:
            text, other = tags.typed
            kinds, options = kinds_of(schema, values.root), list[str]()
            if "string" in kinds:
                of_text = values.text_of(schema)
                options.append(f"{literal(text)} {values.tagged(of_text, end, tags.end)}")
            if kinds != TEXT:
                value = values.tagged(schema, end, tags.end, json_only=True)
                options.append(f"{literal(other)} {value}")
            return f"{key} ({' | '.join(options)})"
        return f"{key} {literal(line)} {values.tagged(schema, end, tags.end)}"

    def _until(self, name: str, terminal: str, text: str, marker: str) -> str:
        """Return a rule for text (a terminal, and its expression) up to the first marker, written
        as one token or as several.
        """
        if marker in self.special:
            return f"{terminal} {self._written(marker)}"
        self.lines += [f"{name}[lazy]: {text} {literal(marker)}"]
        if marker in self._ids:
            return f"{name} | {terminal} {self._written(marker)}"
        return name

    def _written(self, text: str) -> str:
        """Return text as a part of a rule, with markers as their tokens. A line break before other
        text is a part of its own, since the joint and the end of calls may both begin with it.
        """
        markers = [each for each in self._format.markers if each in self._ids]
        parts = re.split("|".join([r"(^\n)", *(f"({re.escape(each)})" for each in markers)]), text)
        return " ".join(
            f"<[{self._ids[part]}]>" if part in markers else literal(part) for part in parts if part
        )


def _arguments(tool: OfferedTool) -> dict[str, Any]:
    """Return the schema of a tool's arguments."""
    if tool.parameters is None:
        return {"type": "object", "additionalProperties": False}
    kinds = tool.parameters.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise InvalidRequest(
            f"the parameters of tool {tool.name!r} must be those of an object, not {kinds!r}."
        )
    return {**tool.parameters, "type": "object"}


def _options(whitespace: str, *, lenient: bool = False) -> dict[str, Any]:
    """Return llguidance's options for JSON."""
    options: dict[str, Any] = {"whitespace_flexible": bool(whitespace)}
    if whitespace:
        options["whitespace_pattern"] = whitespace
    return options | ({"lenient": True, "coerce_one_of": True} if lenient else {})
