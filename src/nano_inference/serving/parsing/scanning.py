"""Incremental scanners: text up to a marker, and the extent of one JSON value. Each character is
looked at a few times at most, however the text is cut.
"""

import re
from collections.abc import Callable, Mapping

SPACE = re.compile(r"[ \t\r\n]+")


class UntilMarker:
    """Text up to a marker. White space directly before the marker belongs to the marker.

    Attributes:
        space: white space and a marker after it, in pieces, that are not passed on: more text
            decides.
        found: the marker has been seen. What follows is not this scanner's.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        first = re.escape(marker[0])
        self._run = re.compile(rf"(?:[^{first} \t\r\n]++|[ \t\r\n]++(?=[^{first} \t\r\n]))++")
        self.space: list[str] = []
        self.found = False

    def feed(self, text: str, begin: int, out: list[str]) -> int:
        """Take `text[begin:]` up to and including the marker, and add to `out` what stands before
        it.

        Returns:
            Where it stopped. Before the end and with no marker found, the rest may be the marker's
            beginning and has to be given again with more text behind it.
        """
        while begin < len(text) and not self.found:
            if run := self._run.match(text, begin):
                out += self.release()
                out.append(run[0])
                begin = run.end()
            elif space := SPACE.match(text, begin):
                self.space.append(space[0])
                begin = space.end()
            elif text.startswith(self._marker, begin):
                self.found = True
                begin += len(self._marker)
            elif begins(self._marker, text, begin):
                break
            else:
                out += self.release()
                out.append(text[begin])
                begin += 1
        return begin

    def release(self) -> list[str]:
        """White space that was held back and turned out to be text."""
        held, self.space = self.space, []
        return held


def begins(marker: str, text: str, begin: int) -> bool:
    """Whether `text[begin:]` is a proper prefix of the marker, so that more text may complete
    it.
    """
    return len(text) - begin < len(marker) and marker.startswith(text[begin:])


# What may follow in a number; `accept` marks the states that may end one.
_DIGITS = "0123456789"
_NUMBER: Mapping[str, Mapping[str, str]] = {
    "minus": {"0": "zero"} | dict.fromkeys("123456789", "whole"),
    "zero": {".": "point", "e": "e", "E": "e"},
    "whole": {".": "point", "e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "whole"),
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "fraction"),
    "e": {"+": "sign", "-": "sign"} | dict.fromkeys(_DIGITS, "exponent"),
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
_ACCEPTING = frozenset({"zero", "whole", "fraction", "exponent"})
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Follows one JSON value, strictly by RFC 8259, without building it.

    Attributes:
        complete: the value has ended.
        failed: what came does not continue a JSON value.
    """

    def __init__(self) -> None:
        self.complete = False
        self.failed = False
        self._open: list[str] = []  # the brackets that close what is open
        self._state: Callable[[JsonScanner, str, int], int] = JsonScanner._value
        self._in_key = False
        self._number = ""
        self._left = ""  # of a literal
        self._hex_left = 0

    def feed(self, text: str, begin: int) -> int:
        """Take `text[begin:]` as far as it belongs to the value. Returns where it stopped.

        A number ends with the character after it.
        """
        while begin < len(text) and not (self.complete or self.failed):
            begin = self._state(self, text, begin)
        return begin

    def _fail(self, begin: int) -> int:
        self.failed = True
        return begin

    def _value_ended(self) -> None:
        self._state = JsonScanner._after
        self.complete = not self._open

    def _value(self, text: str, begin: int) -> int:
        character = text[begin]
        if character == '"':
            self._in_key, self._state = False, JsonScanner._string
        elif character == "{":
            self._open.append("}")
            self._state = JsonScanner._first_key
        elif character == "[":
            self._open.append("]")
            self._state = JsonScanner._first_item
        elif character in _LITERALS:
            self._left, self._state = _LITERALS[character], JsonScanner._literal
        elif number := {"-": "minus"}.get(character) or _NUMBER["minus"].get(character):
            self._number, self._state = number, JsonScanner._in_number
        else:
            return self._space(text, begin)
        return begin + 1

    def _first_item(self, text: str, begin: int) -> int:
        return self._close(begin) if text[begin] == "]" else self._value(text, begin)

    def _first_key(self, text: str, begin: int) -> int:
        return self._close(begin) if text[begin] == "}" else self._key(text, begin)

    def _key(self, text: str, begin: int) -> int:
        if text[begin] != '"':
            return self._space(text, begin)
        self._in_key, self._state = True, JsonScanner._string
        return begin + 1

    def _colon(self, text: str, begin: int) -> int:
        if text[begin] != ":":
            return self._space(text, begin)
        self._state = JsonScanner._value
        return begin + 1

    def _after(self, text: str, begin: int) -> int:
        if text[begin] == self._open[-1]:
            return self._close(begin)
        if text[begin] != ",":
            return self._space(text, begin)
        self._state = JsonScanner._key if self._open[-1] == "}" else JsonScanner._value
        return begin + 1

    def _close(self, begin: int) -> int:
        self._open.pop()
        self._value_ended()
        return begin + 1

    def _space(self, text: str, begin: int) -> int:
        space = SPACE.match(text, begin)
        return space.end() if space and self._open else self._fail(begin)

    def _string(self, text: str, begin: int) -> int:
        if plain := _PLAIN.match(text, begin):
            return plain.end()
        if text[begin] == "\\":
            self._state = JsonScanner._escape
        elif text[begin] == '"':
            if self._in_key:
                self._state = JsonScanner._colon
            else:
                self._value_ended()
        else:
            return self._fail(begin)
        return begin + 1

    def _escape(self, text: str, begin: int) -> int:
        if text[begin] == "u":
            self._hex_left, self._state = 4, JsonScanner._hex
        elif text[begin] in '"\\/bfnrt':
            self._state = JsonScanner._string
        else:
            return self._fail(begin)
        return begin + 1

    def _hex(self, text: str, begin: int) -> int:
        if text[begin] not in _HEX:
            return self._fail(begin)
        self._hex_left -= 1
        if not self._hex_left:
            self._state = JsonScanner._string
        return begin + 1

    def _literal(self, text: str, begin: int) -> int:
        if text[begin] != self._left[0]:
            return self._fail(begin)
        self._left = self._left[1:]
        if not self._left:
            self._value_ended()
        return begin + 1

    def _in_number(self, text: str, begin: int) -> int:
        if following := _NUMBER[self._number].get(text[begin]):
            self._number = following
            return begin + 1
        if self._number not in _ACCEPTING:
            return self._fail(begin)
        self._value_ended()
        return begin  # the character after the number is not part of it
