"""Results of a parser of model output."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of one tool call.

    Attributes:
        index: Index of the call in the answer.
        id: `call_` and 24 hexadecimal digits, in the call's first part. None in later ones.
        name: Name of the function, in the call's first part. None in later ones.
        arguments: Next part of the arguments' JSON text. May be empty.
        broken: True if it turned out not to be a call, so that its text is content.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """New output after one piece of text. In the answer, reasoning comes before content.

    Attributes:
        content: Next part of the answer to the user.
        reasoning: Next part of the model's reasoning.
        tool_calls: Next parts of tool calls, in order, at most one per call.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser(Protocol):
    """Parser of one sample, which accepts any text in pieces of any size and never raises.

    The joined `content`, `reasoning` and arguments of each call do not depend on the pieces.
    """

    def push(self, text: str) -> Parsed:
        """Parse the next text. Returns its final part, and holds back a possible beginning of a
        marker.
        """
        ...

    def finish(self, *, cut_off: bool = True) -> Parsed:
        """Return the rest at the end of the sample. Push nothing afterwards.

        Args:
            cut_off: True if the sample did not end by itself, so that a call may be unfinished.
                False: an unfinished call is broken.
        """
        ...


class PlainParser:
    """Parser of output that is only content."""

    def push(self, text: str) -> Parsed:
        """Return `text` as content."""
        return Parsed(content=text)

    def finish(self, *, cut_off: bool = True) -> Parsed:
        """Return nothing, since no text is held back."""
        return Parsed()
