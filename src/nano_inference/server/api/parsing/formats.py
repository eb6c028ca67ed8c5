"""How a family of models writes reasoning and tool calls, recognised by its chat template."""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from nano_inference.errors import ConfigError
from nano_inference.server.api.parsing.harmony import FINAL, HARMONY, HarmonyParser
from nano_inference.server.api.parsing.output import OutputParser, Parsed, PlainParser
from nano_inference.server.api.parsing.scanning import Steps, TextReader
from nano_inference.server.api.parsing.tool_parsers import TOOL_FORMATS, ToolCallParser


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family writes reasoning: once, at the beginning of an answer.

    Attributes:
        begin: opens it. A template may have written it already, as the end of the prompt.
        end: closes it.
    """

    begin: str
    end: str


REASONING_FORMATS = {"think": ReasoningFormat("<think>", "</think>")}


class Behind(NamedTuple):
    """The text after which a grammar begins; see `Grammar`."""

    after: str = ""
    opened_by: str = ""


AT_ONCE = Behind()


class ReasoningParser(TextReader):
    """Reasoning, then what another parser makes of the rest. White space around the markers belongs
    to them.

    Args:
        format: how the model writes reasoning.
        inside: the answer begins with reasoning that is open already.
        answer: the parser of what follows the reasoning.
    """

    def __init__(self, format: ReasoningFormat, inside: bool, answer: OutputParser) -> None:
        super().__init__()
        self._format, self._inside, self._answer = format, inside, answer
        self._over = False  # the rest is the answer
        self._space_before: list[str] = []
        self._reasoning: list[str] = []  # what the next `Parsed` will hold

    def push(self, text: str) -> Parsed:
        """Take the next text."""
        if self._over:
            return self._answer.push(text)
        self._go_on(text)
        return self._parsed()

    def finish(self, *, cut_off: bool = True) -> Parsed:
        """The sample ended."""
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
            found = yield from self._until(self._format.end, self._reasoning.append, space)
            if not found:
                self._reasoning += space
            space.clear()
            if found:
                yield from self._space(space)
            space.clear()
        self._over = True
        return True


TOOL_FORMAT_NAMES = ("none", *TOOL_FORMATS, HARMONY)
REASONING_FORMAT_NAMES = ("none", *REASONING_FORMATS, HARMONY)

# A template renders earlier calls the way its model writes them. What a template must hold, and
# what it must not: a format of the same markers with something else than JSON objects between them.
_IN_CHANNELS = (HARMONY, r"<\|channel\|>(analysis|commentary|final)", r"(?!)")
_TOOL_SIGNS = (
    _IN_CHANNELS,
    *((name, each.sign, each.other_sign) for name, each in TOOL_FORMATS.items()),
)
_REASONING_SIGNS = (_IN_CHANNELS, ("think", r"</?think>", r"(?!)"))


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model writes what is not content.

    Attributes:
        tools: the name of the tool-call format, or None: tool calls are not recognised.
        reasoning: the name of the reasoning format, or None: the model writes none, or it is not
            recognised.
    """

    tools: str | None = None
    reasoning: str | None = None

    @property
    def in_channels(self) -> bool:
        """Every answer has markers, which are special tokens: its parser has to see their text."""
        return HARMONY in (self.tools, self.reasoning)


def chat_format(
    template: str | None, tool_format: str | None = None, reasoning_format: str | None = None
) -> ChatFormat:
    """The format of the models that this chat template belongs to.

    Args:
        template: Jinja source, or None where the model has none.
        tool_format: one of `TOOL_FORMAT_NAMES`, instead of what the template tells. None: the
            template decides.
        reasoning_format: one of `REASONING_FORMAT_NAMES`, likewise.

    Raises:
        ConfigError: there is no format of that name, or the two cannot be of one model.
    """
    found = ChatFormat(
        tools=_choose("tool", tool_format, TOOL_FORMAT_NAMES, template, _TOOL_SIGNS),
        reasoning=_choose(
            "reasoning", reasoning_format, REASONING_FORMAT_NAMES, template, _REASONING_SIGNS
        ),
    )
    if found.in_channels and {found.tools, found.reasoning} - {HARMONY, None}:
        raise ConfigError(
            f"{HARMONY} is how a model writes both tool calls and reasoning; tool format "
            f"{found.tools} and reasoning format {found.reasoning} do not go together."
        )
    return found


def _choose(
    kind: str,
    name: str | None,
    names: tuple[str, ...],
    template: str | None,
    signs: Iterable[tuple[str, str, str]],
) -> str | None:
    if name is not None:
        if name not in names:
            raise ConfigError(
                f"there is no {kind} format {name!r}; choose one of {', '.join(names)}"
            )
        return None if name == "none" else name
    if template is None:
        return None
    found = (
        row
        for row, present, absent in signs
        if re.search(present, template) and not re.search(absent, template)
    )
    return next(found, None)


def reasoning_before(
    format: ChatFormat, *, prompt_tail: str, goes_on: bool = False, hidden: Container[str] = ()
) -> Behind:
    """Return the text after which the grammar of an answer begins.

    Args:
        format: of the model.
        prompt_tail: as `make_parser` has it. Where the template has closed the reasoning there is
            none in the answer; where it has not opened it there may be.
        goes_on: the prompt ends with the beginning of the answer, behind its reasoning.
        hidden: markers that the parser does not see. Reasoning between such ones would be content.
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


def make_parser(
    format: ChatFormat, *, tools: bool, reasoning: bool, prompt_tail: str, mark: str = ""
) -> OutputParser:
    """A parser for one sample.

    Args:
        format: of the model.
        tools: whether the request allows tool calls. False: they stay text.
        reasoning: whether reasoning is told apart. False: it stays text.
        prompt_tail: the last words of the prompt, special tokens written out: where the template
            has opened the reasoning already, the answer begins inside. Some 100 characters do.
        mark: stands before special tokens, in channels; without it a marker in ordinary letters is
            taken for one.
    """
    if format.in_channels:
        return HarmonyParser(
            tools=tools and format.tools == HARMONY,
            reasoning=reasoning and format.reasoning == HARMONY,
            prompt_tail=prompt_tail,
            mark=mark,
        )
    parser: OutputParser = (
        ToolCallParser(TOOL_FORMATS[format.tools]) if tools and format.tools else PlainParser()
    )
    if reasoning and format.reasoning:
        row = REASONING_FORMATS[format.reasoning]
        parser = ReasoningParser(row, prompt_tail.rstrip().endswith(row.begin), parser)
    return parser
