"""Reasoning that a model writes between markers before its answer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from nano_inference.serving.parsing.output import OutputParser, Parsed
from nano_inference.serving.parsing.scanning import SPACE, UntilMarker, begins


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


class ReasoningParser:
    """Reasoning, then what another parser makes of the rest. White space around the markers belongs
    to them.

    Args:
        format: how the model writes reasoning.
        inside: the answer begins with reasoning that is open already.
        answer: the parser of what follows the reasoning.
    """

    def __init__(self, format: ReasoningFormat, inside: bool, answer: OutputParser) -> None:
        self._format = format
        self._answer = answer
        self._state: Callable[[ReasoningParser, str, int], int] = (
            ReasoningParser._space if inside else ReasoningParser._start
        )
        self._marker = UntilMarker(format.end)
        self._tail = ""  # may be the beginning of a marker
        self._held: list[str] = []  # space before what may be the marker
        self._reasoning: list[str] = []  # what the next `Parsed` will hold

    def push(self, text: str) -> Parsed:
        """Take the next text."""
        text = self._tail + text
        begin = 0
        while begin < len(text) and self._state is not ReasoningParser._rest:
            state, end = self._state, self._state(self, text, begin)
            if end == begin and self._state is state:
                break  # more text decides
            begin = end
        if self._state is not ReasoningParser._rest:
            self._tail = text[begin:]
            return self._parsed(Parsed())
        self._tail = ""
        rest = "".join([*self._held, text[begin:]])
        self._held = []
        return self._parsed(self._answer.push(rest) if rest else Parsed())

    def finish(self) -> Parsed:
        """The sample ended."""
        if self._state is ReasoningParser._start:
            answer = self._answer.push("".join([*self._held, self._tail]))
            last = self._answer.finish()
            return Parsed(
                answer.content + last.content, tool_calls=answer.tool_calls + last.tool_calls
            )
        self._reasoning += [*self._marker.release(), self._tail]
        return self._parsed(self._answer.finish())

    def _parsed(self, answer: Parsed) -> Parsed:
        reasoning, self._reasoning = "".join(self._reasoning), []
        return replace(answer, reasoning=reasoning) if reasoning else answer

    def _start(self, text: str, begin: int) -> int:
        if space := SPACE.match(text, begin):
            self._held.append(space[0])
            return space.end()
        if text.startswith(self._format.begin, begin):
            self._held = []
            self._state = ReasoningParser._space
            return begin + len(self._format.begin)
        if not begins(self._format.begin, text, begin):
            self._state = ReasoningParser._rest
        return begin

    def _space(self, text: str, begin: int) -> int:
        if space := SPACE.match(text, begin):
            return space.end()
        self._state = ReasoningParser._inside
        return begin

    def _inside(self, text: str, begin: int) -> int:
        end = self._marker.feed(text, begin, self._reasoning)
        if self._marker.found:
            self._marker.release()
            self._state = ReasoningParser._after
        return end

    def _after(self, text: str, begin: int) -> int:
        if space := SPACE.match(text, begin):
            return space.end()
        self._state = ReasoningParser._rest
        return begin

    def _rest(self, text: str, begin: int) -> int:
        return begin
