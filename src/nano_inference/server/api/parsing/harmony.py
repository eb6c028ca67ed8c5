"""Harmony, the format of gpt-oss. An answer is a sequence of messages, whose headers name channel
and recipient (https://github.com/openai/harmony, docs/format.md).

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

`analysis` is reasoning. `final` is content, and so is `commentary` without a recipient. A message
to `functions.x` is a call of x, and its body holds the arguments: a JSON object, in which small
mistakes are mended. If the arguments break, they are content. The markers are special tokens. The
parser's input must include their text, after a mark that ordinary tokens cannot write.
"""

import re
import secrets
from functools import cache
from typing import Literal

from nano_inference.server.api.parsing.output import Parsed, ToolCallDelta
from nano_inference.server.api.parsing.scanning import JsonMender

HARMONY = "harmony"
FINAL = "<|channel|>final<|message|>"  # precedes the content

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKERS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_IN_CHANNEL = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."
# possible text between the prompt's `<|start|>assistant` and the next marker
_BEHIND_ROLE = re.compile(r"\s*(t(o(=\S*)?)?)?\s*")
_SPACE = " \t\r\n"
_MOST_HEADER = 1000  # characters; a longer text is not a header

Kind = Literal["reasoning", "content", "call"]


class HarmonyParser:
    """Parser of one answer.

    Args:
        tools: Separate tool calls. False: they are content.
        reasoning: Separate reasoning. False: it is content.
        prompt_tail: End of the prompt: `<|start|>assistant`, or the beginning of a message.
        mark: Text before each special token, also in `prompt_tail`.
    """

    def __init__(self, *, tools: bool, reasoning: bool, prompt_tail: str, mark: str = "") -> None:
        self._tools, self._reasoning, self._mark = tools, reasoning, mark
        self._marker, self._beginnings = _looks(mark)
        self._held = ""  # a possible beginning of a marker
        self._kind: Kind = "content"  # kind of the message
        self._header: str | None = None  # received part; None: its message has begun
        self._from_prompt = 0  # characters of the header that are in the prompt
        self._has_marker = False  # True once the header has one, and is certain to be a header
        self._new_message = False  # True until its first text
        self._calls = 0
        self._arguments = JsonMender()  # arguments of the last call
        self._has_begun = False  # True once the arguments have begun
        self._body: list[str] = []  # the arguments as the model wrote them
        self._said: dict[Kind, list[str]] = {"reasoning": [], "content": []}
        self._spoken: set[Kind] = set()  # kinds that have had text
        # by call: id and name in its first part, and new arguments
        self._news: dict[int, tuple[str | None, str | None, list[str]]] = {}
        self._broken: set[int] = set()
        _, start, header = prompt_tail.rpartition(mark + _START)
        header, message, _ = header.partition(mark + _MESSAGE)
        header = header.replace(mark, "") if mark else header
        if start and message:
            self._open(header)
            self._new_message = False
        elif start:
            self._header, self._from_prompt = header, len(header)
            self._has_marker = _CHANNEL in header

    def push(self, text: str) -> Parsed:
        """Parse the next text."""
        text, at = self._held + text, 0
        for marker in self._marker.finditer(text):
            self._say(text[at : marker.start()])
            self._take(marker[1])
            at = marker.end()
        begun = self._beginning_of_a_marker(text[at:])
        self._held = text[len(text) - begun :]
        self._say(text[at : len(text) - begun])
        return self._parsed()

    def finish(self, *, cut_off: bool = True) -> Parsed:
        """Parse the rest at the end of the sample. A header without a message is dropped."""
        self._say(self._held)
        self._held = ""
        self._close(cut_off=cut_off)
        return self._parsed()

    def _parsed(self) -> Parsed:
        reasoning, content = ("".join(self._said[kind]) for kind in ("reasoning", "content"))
        calls = (
            ToolCallDelta(index, call_id, name, "".join(arguments), index in self._broken)
            for index, (call_id, name, arguments) in self._news.items()
        )
        parsed = Parsed(content, reasoning, tuple(calls))
        self._news.clear()
        self._broken.clear()
        for parts in self._said.values():
            parts.clear()
        return parsed

    def _take(self, marker: str) -> None:
        """Handle a marker."""
        if marker in (_START, _CHANNEL) and self._header is None:
            self._close()
            self._header, self._from_prompt, self._has_marker = "", 0, True
        if self._header is None:
            if marker in _ENDS:
                self._close()
            else:
                self._say(marker)  # misplaced, so it is text
        elif marker == _MESSAGE:
            self._open(self._header)
        elif marker in _ENDS:
            self._header = None  # and no message
        elif marker != _START:
            self._has_marker = True
            self._say(marker)

    def _open(self, header: str) -> None:
        """Begin a message."""
        recipient, channel = _RECIPIENT.search(header), _IN_CHANNEL.search(header)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        self._header, self._new_message = None, True
        if self._tools and recipient and recipient[1].startswith(_FUNCTIONS) and name:
            self._kind, self._arguments, self._has_begun = "call", JsonMender(), False
            self._body.clear()
            self._news[self._calls] = (f"call_{secrets.token_hex(12)}", name, [])
            self._calls += 1
        elif self._reasoning and channel and channel[1] == "analysis":
            self._kind = "reasoning"
        else:
            self._kind = "content"

    def _close(self, *, cut_off: bool = False) -> None:
        """End the message. Text that follows without a header is content."""
        if self._header is None and self._kind == "call":
            if not "".join(self._body).strip():
                self._tell("{}")
            elif not (self._arguments.complete or cut_off):
                self._break()
        self._kind, self._new_message = "content", True

    def _break(self) -> None:
        """Report the call as broken, and its body as content."""
        self._tell("")
        self._broken.add(self._calls - 1)
        self._kind, self._new_message = "content", True
        self._say("".join(self._body))

    def _argue(self, text: str) -> None:
        """Read the next part of a call's arguments."""
        self._body.append(text)
        if not self._has_begun:
            text = text.lstrip(_SPACE)
        if not text:
            return
        begins_wrong = not self._has_begun and not text.startswith("{")
        self._has_begun = True
        end = 0 if begins_wrong else self._arguments.feed(text, 0)
        if new := self._arguments.taken():
            self._tell(new)
        if begins_wrong or text[end:].strip(_SPACE):
            self._break()

    def _say(self, text: str) -> None:
        """Read text between markers, or a marker in a header."""
        text = text.replace(self._mark, "") if self._mark else text
        if not text:
            return
        if self._header is not None:
            self._header += text
            if self._is_header(self._header):
                return
            text, self._header = self._header[self._from_prompt :], None
        if self._kind == "call":
            self._argue(text)
            return
        if self._new_message and self._kind in self._spoken:
            text = "\n" + text
        self._new_message = False
        self._spoken.add(self._kind)
        self._said[self._kind].append(text)

    def _is_header(self, header: str) -> bool:
        """Return True if the text may still become a header. An answer that begins with other text
        has none.
        """
        return len(header) <= _MOST_HEADER and (
            self._has_marker or _BEHIND_ROLE.fullmatch(header, self._from_prompt) is not None
        )

    def _tell(self, arguments: str) -> None:
        """Report the next part of the last call's arguments."""
        self._news.setdefault(self._calls - 1, (None, None, []))[2].append(arguments)

    def _beginning_of_a_marker(self, text: str) -> int:
        """Return the number of characters at the text's end that may begin a marker."""
        at = text.rfind(self._mark[0] if self._mark else "<")
        end = text[at:] if at >= 0 else ""
        return len(end) if end and any(each.startswith(end) for each in self._beginnings) else 0


@cache
def _looks(mark: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Return a pattern for all markers after `mark`, and the markers themselves."""
    names = "|".join(map(re.escape, _MARKERS))
    return re.compile(f"{re.escape(mark)}({names})"), tuple(mark + each for each in _MARKERS)
