"""Grammars of tool calls. The parsers read text drawn under them as valid calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.parsing.formats import ChatFormat, reasoning_before
from nano_inference.server.api.parsing.tool_parsers import TOOL_FORMATS, ToolFormat
from nano_inference.structured.grammar import BOUNDED, Grammar
from nano_inference.structured.structural_tag import ANYTHING, literal, schema_part
from nano_inference.text.tokenizer import Tokenizer


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
        raise InvalidRequest(
            f"tool calls in the format {format.tools} cannot be forced, nor can schemas of strict "
            "tools or of an answer next to tools be enforced; leave the choice to the model."
        )
    rules = _Rules(format.tools, tokenizer)
    behind = reasoning_before(
        format, prompt_tail=prompt_tail, goes_on=goes_on, hidden=rules.special
    )
    if behind.opened_by:
        rules.keep_from_beginning(behind.opened_by[0])
    answers = rules.answers(demand, content)
    text = "\n".join(["%llguidance {}", f"start: {answers}", *rules.lines, ""])
    lenient = not all(tool.strict for tool in demand.tools)
    if content is not None and not demand.forced:
        lenient |= content.lenient
    return Grammar("lark", text, lenient=lenient, backend="llguidance", **behind._asdict())


class _Rules:
    """Rules of Lark for one format and one tokenizer.

    Attributes:
        special: Special tokens, whose text the parsers do not see.
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
        begin, calls = self._format.begin, self._calls(demand)
        bare = self._format.bare
        if begin in self.special and not bare:
            raise InvalidRequest(
                f"tool calls in the format {self._name} cannot be forced: {begin} is a special "
                "token of this model's tokenizer, which answers do not show."
            )
        marked = f'SPACE? {self._written(begin)} " "? {calls}'
        at_once = f"{self._bare_opening()} some_calls | {marked}" if bare else marked
        if demand.forced:
            return at_once
        if content is not None:
            options = _options(content.whitespace, lenient=content.lenient)
            schema = schema_part(json.loads(content.text), options)
            self.lines += [f"content: {schema}"]
            return f"{marked} | SPACE? content"
        text = f"/{_free(self._format, self._not_first)}/" if bare else ANYTHING
        self.lines += [f"TEXT: {text}"]
        later = f'({self._until("text_until", "TEXT", text, begin)}) " "? {calls}'
        return f"TEXT | {later} | {at_once}" if bare else f"TEXT | {later}"

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
            head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{form.arguments}": '
            schema = schema_part(_arguments(tool), _options(BOUNDED, lenient=not tool.strict))
            self.lines += [f"call_{number}: {literal(head)} {schema} {literal('}')}"]
        more = f" ({self._written(form.joint)} call)*" if demand.parallel else ""
        self.lines += [
            f"call: {' | '.join(f'call_{number}' for number in range(len(demand.tools)))}",
            f"some_calls: call{more} {self._written(form.closing)}",
            f"calls: {self._written(form.opening)} some_calls",
        ]
        return "calls"

    def _until(self, name: str, terminal: str, text: str, marker: str) -> str:
        """Return a rule for text (a terminal, and its expression) up to the first marker, written
        as one token or as several.
        """
        self.lines += [f"{name}[lazy]: {text} {literal(marker)}"]
        if marker in self._ids and marker not in self.special:
            return f"{name} | {terminal} {self._written(marker)}"
        return name

    def _written(self, text: str) -> str:
        """Return text as a part of a rule, with markers as their tokens."""
        markers = filter(None, (self._format.begin, self._format.end))
        parts = re.split("|".join(f"({re.escape(each)})" for each in markers), text)
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else literal(part)
            for part in parts
            if part
        )


def _free(format: ToolFormat, not_first: str) -> str:
    """Return a pattern for text that the parser does not read as calls without a marker."""
    space, opener = r" \t\r\n", format.opener
    first = f"[^{space}{re.escape((opener or '{') + not_first)}]"
    if opener:
        first = rf"({first}|{re.escape(opener)}[{space}]*[^{space}{{])"
    return rf"[{space}]*({first}(.|\n)*)?"


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
