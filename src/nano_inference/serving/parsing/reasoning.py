"""Reasoning that a model writes between markers before its answer."""

from dataclasses import dataclass, replace

from nano_inference.serving.parsing.output import OutputParser, Parsed
from nano_inference.serving.parsing.scanning import Steps, TextReader


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

    def finish(self) -> Parsed:
        """The sample ended."""
        if not self._over:
            self._go_on(ended=True)
        begun, last = self._parsed(), self._answer.finish()
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
