"""Grammars of tool calls: what is drawn under them is what the parsers read back as valid calls."""

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
        name: of the function.
        parameters: JSON schema of its arguments; None: it takes none.
        strict: keywords of the schema that cannot be enforced are refused. False: they are passed
            over.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolDemand:
    """How tools may be called.

    Attributes:
        tools: that may be called.
        forced: the answer is a call. False: it may be text instead, or have text before a call.
        parallel: several calls may follow each other.
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
    """The grammar of an answer. After the calls nothing follows.

    Args:
        demand: what may be called.
        format: of the model.
        tokenizer: a marker that is one of its added tokens is written as that.
        prompt_tail: as `make_parser` has it.
        goes_on: the prompt ends with the beginning of the answer, behind its reasoning.
        content: JSON that an answer without calls has to be; calls need their marker then. None:
            any text.

    Raises:
        InvalidRequest: calls in this format cannot be forced, or a tool's parameters are not those
            of an object.
    """
    if format.tools is None:
        raise InvalidRequest(
            "this model's way to write tool calls is not known, so that they cannot be forced; "
            f"name one with --tool-format of the server: {', '.join(TOOL_FORMATS)}."
        )
    if format.in_channels:
        raise InvalidRequest(
            f"tool calls in the format {format.tools} cannot be forced yet, nor can schemas of "
            "strict tools or an answer's beside tools; leave the choice to the model."
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
    """Rules of Lark for one format, with one tokenizer.

    Attributes:
        special: tokens that the parsers do not see where they are drawn.
        lines: of the grammar.
    """

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        self._ids = {token.content: token_id for token_id, token in added.items()}
        self.special = {token.content for token in added.values() if token.special}
        self._name, self._format = name, TOOL_FORMATS[name]
        self._not_first = ""  # characters that text may not begin with
        self.lines = ["SPACE: /[ \\t\\r\\n]{1,4}/"]

    def keep_from_beginning(self, character: str) -> None:
        """Text may not begin with this character, where calls may begin without a marker."""
        self._not_first += character

    def answers(self, demand: ToolDemand, content: Grammar | None) -> str:
        """What an answer may be."""
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
        """What opens calls without a marker. It is one with the space before it: text may begin
        with both, too, and the longest match counts.
        """
        opening = self._format.opening
        if not opening:
            return "SPACE?"
        self.lines += [f"OPENING: /[ \\t\\r\\n]{{0,4}}{re.escape(opening)}/"]
        return "OPENING"

    def _calls(self, demand: ToolDemand) -> str:
        """A rule of calls, behind the marker that opens them."""
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
        """Text (a terminal, and its expression) and then the first marker, as a token of its own
        or not.
        """
        self.lines += [f"{name}[lazy]: {text} {literal(marker)}"]
        if marker in self._ids and marker not in self.special:
            return f"{name} | {terminal} {self._written(marker)}"
        return name

    def _written(self, text: str) -> str:
        """Text with markers."""
        markers = filter(None, (self._format.begin, self._format.end))
        parts = re.split("|".join(f"({re.escape(each)})" for each in markers), text)
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else literal(part)
            for part in parts
            if part
        )


def _free(format: ToolFormat, not_first: str) -> str:
    """Expression of text that the parser does not take for calls without a marker."""
    space, opener = r" \t\r\n", format.opener
    first = f"[^{space}{re.escape((opener or '{') + not_first)}]"
    if opener:
        first = rf"({first}|{re.escape(opener)}[{space}]*[^{space}{{])"
    return rf"[{space}]*({first}(.|\n)*)?"


def _arguments(tool: OfferedTool) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    if tool.parameters is None:
        return {"type": "object", "additionalProperties": False}
    kinds = tool.parameters.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise InvalidRequest(
            f"the parameters of tool {tool.name!r} must be those of an object, not {kinds!r}."
        )
    return {**tool.parameters, "type": "object"}


def _options(whitespace: str, *, lenient: bool = False) -> dict[str, Any]:
    """Of llguidance, for JSON."""
    options: dict[str, Any] = {"whitespace_flexible": bool(whitespace)}
    if whitespace:
        options["whitespace_pattern"] = whitespace
    return options | ({"lenient": True, "coerce_one_of": True} if lenient else {})
