"""What a parser of model output gives out."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call.

    Attributes:
        index: which call of the answer, from 0.
        id: `call_` and 24 hexadecimal digits, in the call's first piece; None in later ones.
        name: of the function, in the call's first piece; None in later ones.
        arguments: the next part of the arguments object's JSON text. May be empty.
        broken: it turned out to be no call; what it said is content.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """What became known with one piece of text. In the answer, reasoning stands before content.

    Attributes:
        content: the next part of what is said to the user.
        reasoning: the next part of what the model thought before.
        tool_calls: the next parts of tool calls, in order, at most one for each call.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser(Protocol):
    """The parser of one sample. Takes any text in any portions and never raises.

    Joined over all pieces, `content`, `reasoning` and the arguments of each call do not depend on
    the portions.
    """

    def push(self, text: str) -> Parsed:
        """Take the next text. Returns what is final now; what may be the beginning of a marker
        waits.
        """
        ...

    def finish(self, *, cut_off: bool = True) -> Parsed:
        """The sample ended: what was held back. Push nothing afterwards.

        Args:
            cut_off: it did not end by itself, so a call may be unfinished; else such a call is
                broken.
        """
        ...


class PlainParser:
    """Everything is content."""

    def push(self, text: str) -> Parsed:
        """`text` as content."""
        return Parsed(content=text)

    def finish(self, *, cut_off: bool = True) -> Parsed:
        """Nothing was held back."""
        return Parsed()
