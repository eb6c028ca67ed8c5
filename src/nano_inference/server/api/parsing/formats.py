"""Formats of reasoning and tool calls by model family, recognized by the chat template."""

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from nano_inference.errors import ConfigError
from nano_inference.server.api.parsing.harmony import FINAL, HARMONY, HarmonyParser
from nano_inference.server.api.parsing.output import OutputParser, Parsed, PlainParser
from nano_inference.server.api.parsing.scanning import Steps, TextReader
from nano_inference.server.api.parsing.tool_formats import PARSER_NAMES, TOOL_FORMATS
from nano_inference.server.api.parsing.tool_parsers import Schemas, ToolCallParser


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Notation of reasoning in a model family: once, at the beginning of an answer.

    Attributes:
        begin: Opening marker. A template may have written it already, at the end of the prompt.
        end: Closing marker.
    """

    begin: str
    end: str


REASONING_FORMATS = {"think": ReasoningFormat("<think>", "</think>")}


class Behind(NamedTuple):
    """Text that precedes a grammar, as fields of `Grammar`."""

    after: str = ""
    opened_by: str = ""


AT_ONCE = Behind()


class ReasoningParser(TextReader):
    """Parser of reasoning, followed by output for another parser. Whitespace around the markers
    belongs to them.

    Args:
        format: Notation of the model.
        inside: True if the prompt has opened the reasoning already.
        answer: Parser of the output after the reasoning.
    """

    def __init__(self, format: ReasoningFormat, inside: bool, answer: OutputParser) -> None:
        super().__init__()
        self._format, self._inside, self._answer = format, inside, answer
        self._over = False  # True once the rest is the answer
        self._space_before: list[str] = []
        self._reasoning: list[str] = []  # pieces for the next `Parsed`

    def push(self, text: str) -> Parsed:
        """Parse the next text."""
        if self._over:
            return self._answer.push(text)
        self._go_on(text)
        return self._parsed()

    def finish(self, *, cut_off: bool = True) -> Parsed:
        """Parse the rest at the end of the sample."""
        if not self._over:
            self._go_on(ended=True)
        begun, last = self._parsed(), self._answer.finish(cut_off=cut_off)
        return Parsed(
            begun.content + last.content, begun.reasoning, begun.tool_calls + last.tool_calls
        )

    def _parsed(self) -> Parsed:
        rest = "".join([*self._space_before, self._text[self._at :]]) if self._over else ""
        if rest:
            self._space_before, self._text = [], ""
        answer = self._answer.push(rest) if rest else Parsed()
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        return replace(answer, reasoning=reasoning) if reasoning else answer

    def _read(self) -> Steps:
        space = self._space_before
        yield from self._space(space)
        if self._inside or (yield from self._take(self._format.begin)):
            space.clear()
            yield from self._space(space)
            space.clear()
            has_ended = yield from self._until(self._format.end, self._reasoning.append, space)
            if not has_ended:
                self._reasoning += space
            space.clear()
            if has_ended:
                yield from self._space(space)
            space.clear()
        self._over = True
        return True


TOOL_FORMAT_NAMES = ("none", *TOOL_FORMATS, HARMONY)
REASONING_FORMAT_NAMES = ("none", *REASONING_FORMATS, HARMONY)

# Templates render earlier calls as the model writes them. Each row has a pattern that a template
# must match, and one that it must not: other formats use the same markers without JSON objects.
_IN_CHANNELS = (HARMONY, r"<\|channel\|>(analysis|commentary|final)", r"(?!)")
_TOOL_SIGNS = (
    _IN_CHANNELS,
    *((name, each.sign, each.other_sign) for name, each in TOOL_FORMATS.items()),
)
_SIGNS = {"tool": _TOOL_SIGNS, "reasoning": (_IN_CHANNELS, ("think", r"</?think>", r"(?!)"))}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Notations of a model's reasoning and tool calls.

    Attributes:
        tools: Name of the tool-call format. None: tool calls are not recognized.
        reasoning: Name of the reasoning format. None: the model writes none, or it is not
            recognized.
    """

    tools: str | None = None
    reasoning: str | None = None

    @property
    def in_channels(self) -> bool:
        """True if every answer has special tokens as markers, whose text the parser must see."""
        return HARMONY in (self.tools, self.reasoning)


def chat_format(
    template: str | None, tool_format: str | None = None, reasoning_format: str | None = None
) -> ChatFormat:
    """Return the format of the models that use this chat template.

    Args:
        template: Jinja source, or None without a template.
        tool_format: One of `TOOL_FORMAT_NAMES`, or vLLM's or SGLang's name of a
            parser, which overrides the template. None: the template
            decides.
        reasoning_format: One of `REASONING_FORMAT_NAMES`, likewise.

    Raises:
        ConfigError: The format does not exist, or the two do not belong to one model.
    """
    formats = ChatFormat(
        tools=_choose("tool", _known_format(tool_format, template), TOOL_FORMAT_NAMES, template),
        reasoning=_choose("reasoning", reasoning_format, REASONING_FORMAT_NAMES, template),
    )
    if formats.in_channels and {formats.tools, formats.reasoning} - {HARMONY, None}:
        raise ConfigError(
            f"{HARMONY} covers both tool calls and reasoning; tool format {formats.tools} and "
            f"reasoning format {formats.reasoning} cannot be combined."
        )
    return formats


def _choose(
    kind: str,
    name: str | None,
    names: tuple[str, ...],
    template: str | None,
) -> str | None:
    if name is not None:
        if name not in names:
            raise ConfigError(
                f"{kind} format {name!r} does not exist; choose one of {', '.join(names)}"
            )
        return None if name == "none" else name
    return next(_shown_by(template, _SIGNS[kind]), None)


def _shown_by(template: str | None, signs: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the formats that a template shows."""
    for row, present, absent in signs if template is not None else ():
        if re.search(present, template or "") and not re.search(absent, template or ""):
            yield row


def _known_format(name: str | None, template: str | None) -> str | None:
    """Return our name of a format. If another system's name means several, the template chooses."""
    formats = PARSER_NAMES.get(name or "", ())
    shown = (each for each in _shown_by(template, _TOOL_SIGNS) if each in formats)
    return next(shown, formats[0] if formats else name)


def reasoning_before(
    format: ChatFormat, *, prompt_tail: str, goes_on: bool = False, hidden: Container[str] = ()
) -> Behind:
    """Return the text after which the grammar of an answer begins.

    Args:
        format: Notation of the model.
        prompt_tail: End of the prompt, as in `make_parser`. If the template has closed the
            reasoning, the answer has none. If the template has not opened it, the answer may have
            some.
        goes_on: True if the prompt ends with the beginning of the answer, after its reasoning.
        hidden: Markers that the parser does not see. Reasoning between them would be content.
    """
    if format.reasoning is None:
        return AT_ONCE
    if format.in_channels:
        return AT_ONCE if goes_on else Behind(FINAL)
    row, tail = REASONING_FORMATS[format.reasoning], prompt_tail.rstrip()
    if tail.endswith(row.begin):
        return Behind(row.end)
    if goes_on or tail.endswith(row.end) or row.begin in hidden or row.end in hidden:
        return AT_ONCE
    return Behind(row.end, row.begin)


def markers_of(format: ChatFormat) -> frozenset[str]:
    """Return the markers of tool calls, which a parser must see even if they are special tokens."""
    row = TOOL_FORMATS.get(format.tools or "")
    return frozenset[str]() if row is None else frozenset(row.markers)


def make_parser(
    format: ChatFormat,
    *,
    tools: Schemas | None,
    reasoning: bool,
    prompt_tail: str,
    mark: str = "",
) -> OutputParser:
    """Return a parser for one sample.

    Args:
        format: Notation of the model.
        tools: Schemas of the tools' arguments, by name. None: calls stay text.
        reasoning: Separate reasoning. False: it stays text.
        prompt_tail: End of the prompt, some 100 characters, including special tokens. If the
            template has opened the reasoning there, the answer begins inside it.
        mark: Text before special tokens of channels. Without it, markers that are written in
            ordinary letters count, too.
    """
    if format.in_channels:
        return HarmonyParser(
            tools=tools is not None and format.tools == HARMONY,
            reasoning=reasoning and format.reasoning == HARMONY,
            prompt_tail=prompt_tail,
            mark=mark,
        )
    parser: OutputParser = (
        ToolCallParser(TOOL_FORMATS[format.tools], tools)
        if tools is not None and format.tools
        else PlainParser()
    )
    if reasoning and format.reasoning:
        row = REASONING_FORMATS[format.reasoning]
        parser = ReasoningParser(row, prompt_tail.rstrip().endswith(row.begin), parser)
    return parser
