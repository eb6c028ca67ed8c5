"""Harmony, the format of gpt-oss: an answer is messages, each with a header that says its channel
and whom it is for (https://github.com/openai/harmony, docs/format.md).

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

`analysis` is reasoning, `final` is content, and so is `commentary` without a recipient. What is
for `functions.x` is a call of x, whose body are the arguments. The markers are special tokens; who
uses this parser has to show it the text of these.
"""

import re
import secrets
from typing import Literal

from nano_inference.serving.parsing.output import Parsed, ToolCallDelta

HARMONY = "harmony"
FINAL = "<|channel|>final<|message|>"  # what stands before the content

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKERS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_IN_CHANNEL = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."
# what may follow the prompt's `<|start|>assistant`, up to the next marker
_BEHIND_ROLE = re.compile(r"\s*(t(o(=\S*)?)?)?\s*")
_MOST_HEADER = 1000  # characters; a longer one is none

Kind = Literal["reasoning", "content", "call"]


class HarmonyParser:
    """The parser of one answer.

    Args:
        tools: calls are told apart; else what they say is content.
        reasoning: so is reasoning.
        prompt_tail: the end of the prompt: `<|start|>assistant`, or the beginning of a message.
    """

    def __init__(self, *, tools: bool, reasoning: bool, prompt_tail: str) -> None:
        self._tools, self._reasoning = tools, reasoning
        self._held = ""  # may be the beginning of a marker
        self._kind: Kind = "content"  # of the message
        self._header: str | None = None  # as far as it has come; None: its message has begun
        self._from_prompt = 0  # characters of the header that the prompt has
        self._has_marker = False  # the header has one, and so is one
        self._new_message = False  # nothing of it has been said
        self._calls = 0
        self._arguments = False  # the last call has some
        self._said: dict[Kind, list[str]] = {"reasoning": [], "content": []}
        self._spoken: set[Kind] = set()  # kinds of which something has been said
        # of calls: id and name, where it is new, and new arguments
        self._news: dict[int, tuple[str | None, str | None, list[str]]] = {}
        _, start, header = prompt_tail.rpartition(_START)
        if start and _MESSAGE in header:
            self._open(header.partition(_MESSAGE)[0])
            self._new_message = False
        elif start:
            self._header, self._from_prompt = header, len(header)
            self._has_marker = _CHANNEL in header

    def push(self, text: str) -> Parsed:
        """Take the next text."""
        text, at = self._held + text, 0
        for marker in _MARKER.finditer(text):
            self._say(text[at : marker.start()])
            self._mark(marker[0])
            at = marker.end()
        begun = _beginning_of_a_marker(text[at:])
        self._held = text[len(text) - begun :]
        self._say(text[at : len(text) - begun])
        return self._parsed()

    def finish(self) -> Parsed:
        """The sample ended. A header whose message never came says nothing."""
        self._say(self._held)
        self._held = ""
        self._close()
        return self._parsed()

    def _parsed(self) -> Parsed:
        reasoning, content = ("".join(self._said[kind]) for kind in ("reasoning", "content"))
        calls = (
            ToolCallDelta(index, call_id, name, "".join(arguments))
            for index, (call_id, name, arguments) in self._news.items()
        )
        parsed = Parsed(content, reasoning, tuple(calls))
        self._news.clear()
        for parts in self._said.values():
            parts.clear()
        return parsed

    def _mark(self, marker: str) -> None:
        """One of the markers."""
        if marker in (_START, _CHANNEL) and self._header is None:
            self._close()
            self._header, self._from_prompt, self._has_marker = "", 0, True
        if self._header is None:
            if marker in _ENDS:
                self._close()
            else:
                self._say(marker)  # it stands where none belongs
        elif marker == _MESSAGE:
            self._open(self._header)
        elif marker in _ENDS:
            self._header = None  # and no message
        elif marker != _START:
            self._has_marker = True
            self._say(marker)

    def _open(self, header: str) -> None:
        """A message begins."""
        recipient, channel = _RECIPIENT.search(header), _IN_CHANNEL.search(header)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        self._header, self._new_message = None, True
        if self._tools and recipient and recipient[1].startswith(_FUNCTIONS) and name:
            self._kind, self._arguments = "call", False
            self._news[self._calls] = (f"call_{secrets.token_hex(12)}", name, [])
            self._calls += 1
        elif self._reasoning and channel and channel[1] == "analysis":
            self._kind = "reasoning"
        else:
            self._kind = "content"

    def _close(self) -> None:
        """The message has ended; what follows without a header is content."""
        if self._header is None and self._kind == "call" and not self._arguments:
            self._tell("{}")
        self._kind, self._new_message = "content", True

    def _say(self, text: str) -> None:
        """Text between markers, or a marker in a header."""
        if not text:
            return
        if self._header is not None:
            self._header += text
            if self._is_header(self._header):
                return
            text, self._header = self._header[self._from_prompt :], None
        if self._kind == "call":
            self._tell(text)
            return
        if self._new_message and self._kind in self._spoken:
            text = "\n" + text
        self._new_message = False
        self._spoken.add(self._kind)
        self._said[self._kind].append(text)

    def _is_header(self, header: str) -> bool:
        """Whether this may still become one. An answer that begins with other text has none."""
        return len(header) <= _MOST_HEADER and (
            self._has_marker or _BEHIND_ROLE.fullmatch(header, self._from_prompt) is not None
        )

    def _tell(self, arguments: str) -> None:
        """The next part of the last call's arguments."""
        self._arguments = True
        self._news.setdefault(self._calls - 1, (None, None, []))[2].append(arguments)


def _beginning_of_a_marker(text: str) -> int:
    """How much of the text's end may be one."""
    at = text.rfind("<")
    end = text[at:] if at >= 0 else ""
    return len(end) if end and any(marker.startswith(end) for marker in _MARKERS) else 0
