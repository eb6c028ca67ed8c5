"""Readers of text that comes in pieces: up to a marker, and to the end of one JSON value. Each
character is read a few times at most, whatever the pieces.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping
from functools import cache

SPACE = re.compile(r"[ \t\r\n]+")

Steps = Generator[None, None, bool]  # waits for more text at each `yield`


class TextReader:
    """Reader of text in pieces. The generator `_read` yields when it needs more text to decide how
    to continue.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._ended = False
        self._recording: list[str] | None = None  # text that was read since `_record`
        self._record_at = 0
        self._reading = self._read()

    def _read(self) -> Steps:
        """Read the whole text."""
        raise NotImplementedError

    def _go_on(self, text: str = "", *, ended: bool = False) -> None:
        """Continue to read with the next text. `ended`: the last one."""
        if self._recording is not None:
            self._recording.append(self._text[self._record_at : self._at])
            self._record_at = 0
        self._text, self._at, self._ended = self._text[self._at :] + text, 0, ended
        next(self._reading, None)

    def _record(self) -> None:
        """Record the text that is read from here on."""
        self._recording, self._record_at = [], self._at

    def _recorded(self) -> str:
        """Return the text that was read since `_record`, and end the record."""
        before, self._recording = self._recording or [], None
        return "".join([*before, self._text[self._record_at : self._at]])

    def _more(self) -> Steps:
        """Wait for a character. False: the text has ended."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def _space(self, out: list[str]) -> Steps:
        """Read whitespace. False: the text has ended after it."""
        while (yield from self._more()):
            space = SPACE.match(self._text, self._at)
            if not space:
                return True
            out.append(space[0])
            self._at = space.end()
        return False

    def _sees(self, marker: str) -> Steps:
        """Return True if the marker comes next."""
        while len(self._text) - self._at < len(marker) and marker.startswith(
            self._text[self._at :]
        ):
            if self._ended:
                return False
            yield
        return self._text.startswith(marker, self._at)

    def _take(self, marker: str) -> Steps:
        """Read the marker if it comes next."""
        is_there = yield from self._sees(marker)
        self._at += len(marker) if is_there else 0
        return is_there

    def _until(self, marker: str, say: Callable[[str], None], space: list[str]) -> Steps:
        """Report the text up to the marker, and read the marker. False: the text has ended.

        Whitespace directly before the marker belongs to it. Until that is known, `space` collects
        it, after its previous contents.
        """
        run = _text_without(marker[0])
        while (yield from self._more()):
            if text := run.match(self._text, self._at):
                end = text.end()
            elif white := SPACE.match(self._text, self._at):
                space.append(white[0])
                self._at = white.end()
                continue
            elif (yield from self._take(marker)):
                return True
            else:
                end = self._at + 1
            say("".join([*space, self._text[self._at : end]]))
            space.clear()
            self._at = end
        return False


@cache
def _text_without(character: str) -> re.Pattern[str]:
    """Return a pattern for text without the character and without whitespace at its end."""
    first = re.escape(character)
    return re.compile(rf"(?:[^{first} \t\r\n]++|[ \t\r\n]++(?=[^{first} \t\r\n]))++")


# -- JSON ------------------------------------------------------------------------------------------

_DIGITS = "0123456789"
_FRACTION = {".": "point", "e": "e", "E": "e"}
_VALUE = {
    '"': "string",
    "{": "object",
    "[": "array",
    "t": "t",
    "f": "f",
    "n": "n",
    "-": "minus",
    "0": "zero",
    **dict.fromkeys("123456789", "whole"),
}
# State -> character -> next state. "object" and "array" open one, "close" closes it, and "end" ends
# a value. "after }" and "after ]" are the states between the values of an open object or array.
_STATES: Mapping[str, Mapping[str, str]] = {
    "value": _VALUE,
    "object": {'"': "key", "}": "close"},
    "array": _VALUE | {"]": "close"},
    "next key": {'"': "key"},
    "colon": {":": "value"},
    "after }": {",": "next key", "}": "close"},
    "after ]": {",": "value", "]": "close"},
    "minus": {"0": "zero"} | dict.fromkeys("123456789", "whole"),
    "zero": _FRACTION,
    "whole": _FRACTION | dict.fromkeys(_DIGITS, "whole"),
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "fraction"),
    "e": {"+": "sign", "-": "sign"} | dict.fromkeys(_DIGITS, "exponent"),
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
    **{
        word[:end]: {word[end]: "end" if word[end + 1 :] == "" else word[: end + 1]}
        for word in ("true", "false", "null")
        for end in range(1, len(word))
    },
    **{
        kind + state: following
        for kind, ended in (("string", "end"), ("key", "colon"))
        for state, following in {
            "": {'"': ended, "\\": f"{kind} escape"},
            " escape": {"u": f"{kind} hex 3"} | dict.fromkeys('"\\/bfnrt', kind),
            **{
                f" hex {left}": dict.fromkeys(
                    "0123456789abcdefABCDEF", f"{kind} hex {left - 1}" if left else kind
                )
                for left in range(4)
            },
        }.items()
    },
}
_NUMBER_ENDS = frozenset({"zero", "whole", "fraction", "exponent"})
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
# text skipped in a state: inside a string, or whitespace within an object or array
_SKIPPED: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(("string", "key"), _PLAIN),
    **dict.fromkeys(("value", "object", "array", "next key", "colon", "after }", "after ]"), SPACE),
}


class JsonScanner:
    """Scanner of one JSON value, strict by RFC 8259, which does not build the value.

    Attributes:
        complete: True if the value has ended.
        failed: True if the text does not continue a JSON value.
    """

    def __init__(self) -> None:
        self.complete = False
        self.failed = False
        self._state = "value"
        self._open: list[str] = []  # closing brackets of the open objects and arrays

    def feed(self, text: str, begin: int) -> int:
        """Read the part of `text[begin:]` that belongs to the value. Return the index of its end.

        A number ends with the character after it.
        """
        while begin < len(text) and not (self.complete or self.failed):
            skipped = _SKIPPED.get(self._state)
            run = skipped.match(text, begin) if skipped is not None else None
            if run and (self._open or skipped is _PLAIN):
                self._write(run[0])
                begin = run.end()
            else:
                begin += self._take(text[begin])
        return begin

    def _take(self, character: str) -> int:
        """Read a character. Return 0 if it is not part of the value or must be read again."""
        following = _STATES[self._state].get(character)
        if following is not None:
            self._write(character)
            self._enter(following)
            return 1
        if self._state in _NUMBER_ENDS:
            self._enter("end")
        else:
            self.failed = True
        return 0

    def _write(self, text: str) -> None:
        """Handle a part of the value's text. Does nothing here."""

    def _enter(self, state: str) -> None:
        if state in ("object", "array"):
            self._open.append("}" if state == "object" else "]")
        elif state == "close":
            self._open.pop()
        if state in ("close", "end"):
            self.complete = not self._open
            state = f"after {self._open[-1]}" if self._open else state
        self._state = state


_PYTHON = {"True": "true", "False": "false", "None": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonMender(JsonScanner):
    """Scanner that also writes the value, and mends small mistakes of models if only one meaning is
    possible: control characters in strings, a backslash that escapes nothing (`C:\\dir`), `True`,
    `False` and `None`, and a comma before a closing bracket.

    A comma and an escape are held back until the next character.
    """

    def __init__(self) -> None:
        super().__init__()
        self._out: list[str] = []
        self._held = ""  # a comma and the space after it, or an escape
        self._word = ""

    def taken(self) -> str:
        """Return the text written since the last call."""
        out = "".join(self._out)
        self._out.clear()
        return out

    def _write(self, text: str) -> None:
        if self._state in ("after }", "after ]") and text == ",":
            self._held = text
        elif self._held.startswith(",") and text.isspace():
            self._held += text
        else:
            self._out.append(self._held + text)
            self._held = ""

    def _take(self, character: str) -> int:
        if self._held.startswith("\\"):
            return self._escape(character)
        if self._state in ("string", "key"):
            if character == "\\":
                self._held, self._state = character, f"{self._state} escape"
                return 1
            if character < " ":
                self._out.append(json.dumps(character)[1:-1])
                return 1
        elif self._held.startswith(",") and character == self._open[-1]:
            self._held = self._held[1:]  # the space
            self._write(character)
            self._enter("close")
            return 1
        elif self._word or (self._state in ("value", "array") and character in "TFN"):
            return self._letter(character)
        return super()._take(character)

    def _escape(self, character: str) -> int:
        """Read a character after a backslash."""
        escape = self._held + character
        unicode = escape[1] == "u" and all(each in _HEX for each in escape[2:])
        if unicode and len(escape) < 6:
            self._held = escape
            return 1
        self._held, self._state = "", self._state.partition(" ")[0]
        if unicode or (len(escape) == 2 and character in '"\\/bfnrt'):
            self._out.append(escape)
            return 1
        if escape == "\\'":
            self._out.append("'")
            return 1
        self._out.append("\\" + escape[:-1])
        return 0

    def _letter(self, character: str) -> int:
        """Read a letter of one of Python's words."""
        self._word += character
        if self._word in _PYTHON:
            self._write(_PYTHON[self._word])
            self._word = ""
            self._enter("end")
        elif not any(word.startswith(self._word) for word in _PYTHON):
            self.failed = True
            return 0
        return 1
